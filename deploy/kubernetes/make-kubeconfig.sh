#!/bin/sh
# Writes a kubeconfig for rolloutd's service account to stdout.
#
#   kubectl apply -f rolloutd.yaml
#   ./make-kubeconfig.sh NAME [CONTEXT] > /etc/rolloutd/NAME.kubeconfig
#
# It reads the cluster of your kubectl's context (or of CONTEXT) and changes
# nothing.  The file has a token: only the daemon may read it.
set -eu
umask 077

name=${1:?usage: make-kubeconfig.sh NAME [CONTEXT]}
context=${2:-$(kubectl config current-context)}

ask() { kubectl --context "$context" "$@"; }

server=$(ask config view --raw --minify -o jsonpath='{.clusters[0].cluster.server}')
token=
tries=0
while [ -z "$token" ]; do    # the token controller fills in the Secret a moment later
    tries=$((tries + 1))
    [ "$tries" -le 20 ] || { echo "the Secret rolloutd/rolloutd-token has no token; is rolloutd.yaml applied?" >&2; exit 1; }
    token=$(ask -n rolloutd get secret rolloutd-token -o jsonpath='{.data.token}' | base64 -d)
    [ -n "$token" ] || sleep 1
done
authority=$(ask -n rolloutd get secret rolloutd-token -o jsonpath='{.data.ca\.crt}')

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
