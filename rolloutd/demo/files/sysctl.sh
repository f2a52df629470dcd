#!/bin/sh
# A node's sysctl(8): its kernel is the directory proc/sys next to bin/.
root=${0%/bin/sysctl}
fault=$(cat "$root/fault" 2>/dev/null)
values=no quiet=no writes=no status=0

place() { printf '%s/%s/sys/%s' "$root" "$1" "$(printf %s "$2" | tr . /)"; }

complain() { echo "sysctl: $1" >&2; status=${2:-255}; }

missing() { complain "cannot stat /proc/sys/$(printf %s "$1" | tr . /): No such file or directory"; }

show() {
    file=$(place proc "$1")
    [ -f "$file" ] || { missing "$1"; return; }
    [ "$fault" = check-wrong ] && file=$(place boot "$1")
    [ "$values" = yes ] && cat "$file" || echo "$1 = $(cat "$file")"
}

set_one() {
    key=$(echo "${1%%=*}" | tr -d ' \t-')
    value=$(echo "${1#*=}" | sed 's/^[ \t]*//; s/[ \t]*$//')
    file=$(place proc "$key")
    [ -f "$file" ] || { missing "$key"; return; }
    [ "$fault" = task-fails ] && { complain "setting key \"$key\": Input/output error" 1; return; }
    echo "$value" > "$file.$$" && mv "$file.$$" "$file"
    [ "$quiet" = yes ] || echo "$key = $value"
}

load() {
    [ -f "$1" ] || { complain "cannot open \"$1\": No such file or directory"; return; }
    while IFS= read -r line || [ -n "$line" ]; do
        case $line in *=*) case $line in [\#\;]*) ;; *) set_one "$line" ;; esac ;; esac
    done < "$1"
}

while [ $# -gt 0 ]; do
    case $1 in
    -n | --values) values=yes ;;
    -q | --quiet) quiet=yes ;;
    -e | --ignore) ;;
    -w | --write) writes=yes ;;
    -a | --all)
        for file in $(cd "$root/proc/sys" && find . -type f | sort); do
            show "$(echo "${file#./}" | tr / .)"
        done ;;
    --system)
        for file in "$root"/etc/sysctl.d/*.conf "$root/etc/sysctl.conf"; do
            [ -f "$file" ] && { [ "$quiet" = yes ] || echo "* Applying $file ..."; load "$file"; }
        done ;;
    -p | --load)
        if [ $# -gt 1 ]; then shift; load "$1"; else load "$root/etc/sysctl.conf"; fi ;;
    -p* | --load=*) file=${1#--load=}; load "${file#-p}" ;;
    -*) echo "sysctl: invalid option $1" >&2; exit 1 ;;
    *=*) set_one "$1" ;;
    *) [ "$writes" = yes ] && complain "\"$1\" must be of the form name=value" 1 || show "$1" ;;
    esac
    shift
done
exit "$status"
