#!/bin/sh
# Takes the node out of service; --undo returns it, --check succeeds if it is drained.
root=${0%/bin/drain}
case $1 in
--check) [ -e "$root/drained" ] ;;
--undo) rm -f "$root/drained"; echo "in service" ;;
*)
    if [ "$(cat "$root/fault" 2>/dev/null)" = drain-fails ]; then
        echo "drain: 3 connections do not end" >&2
        exit 1
    fi
    : > "$root/drained"
    echo "drained" ;;
esac
