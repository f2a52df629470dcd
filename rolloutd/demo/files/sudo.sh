#!/bin/sh
# A node's user may write all of the node's files already.
while [ $# -gt 0 ]; do
    case $1 in
    --) shift; break ;;
    -u | -g | -p | -U | -C | -r | -t) shift ;;
    -*) ;;
    *=*) export "$1" ;;
    *) break ;;
    esac
    shift
done
exec "$@"
