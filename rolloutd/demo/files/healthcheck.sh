#!/bin/sh
# A team's check of its service on this node.
root=${0%/bin/healthcheck}
if [ "$(cat "$root/fault" 2>/dev/null)" = check-wrong ]; then
    echo "unhealthy: the service answers 503"
    exit 1
fi
echo "healthy"
