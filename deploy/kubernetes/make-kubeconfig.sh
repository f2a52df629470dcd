#!/bin/sh
# Writes a kubeconfig for rolloutd's service account to stdout.
#
#   kubectl apply -f rolloutd.yaml
#   ./make-kubeconfig.sh NAME [CONTEXT [DURATION]] > /etc/rolloutd/NAME.kubeconfig
#
# It reads the cluster of your kubectl's context (or of CONTEXT) and requests a
# token that expires after DURATION (24h).  Run it again before that, for example
# by a timer: the daemon reads the new file by itself.  The file has the token:
# only the daemon may read it.
set -eu
umask 077

name=${1:?usage: make-kubeconfig.sh NAME [CONTEXT [DURATION]]}
context=${2:-$(kubectl config current-context)}
duration=${3:-24h}

ask() { kubectl --context "$context" "$@"; }

server=$(ask config view --raw --minify -o jsonpath='{.clusters[0].cluster.server}')
authority=$(ask -n rolloutd get configmap kube-root-ca.crt -o jsonpath='{.data.ca\.crt}' | base64 | tr -d '\n')
token=$(ask -n rolloutd create token rolloutd --duration="$duration")

cat <<END
apiVersion: v1
kind: Config
current-context: $name
clusters:
  - name: $name
    cluster: {server: "$server", certificate-authority-data: "$authority"}
users:
  - name: rolloutd
    user: {token: "$token"}
contexts:
  - name: $name
    context: {cluster: $name, user: rolloutd}
END
