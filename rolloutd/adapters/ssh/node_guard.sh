# The guard on a node: restores paths unless it is disarmed.  POSIX sh; runs as root, without an agent.
#
#   guard.sh OPERATION NODE_DIR TOKEN [ARGUMENTS]
#
# Each guard is a directory NODE_DIR/TOKEN.  Its state is the name of one file there, and changes by rename(2)
# only: armed -> confirmed, or armed -> restoring -> restored.  So exactly one of `confirmed` and `restored`
# happens, whichever request is first.  A restore that was interrupted is continued by the next one.

LC_ALL=C
PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin
export LC_ALL PATH
umask 077

LOCK_WAIT_S=20           # an arm or a restore of another process
START_WAITS=50           # how often `watch` looks for the timer that it has started, each 0.2 s
RESTORE_WAITS=150        # how often `restore` looks for the end of the detached restore, each 0.2 s
COMMAND_LIMIT_S=60       # of each command after a restore
KILL_AFTER_S=10          # of a command that ignores SIGTERM: the restore must end
MAX_BACKUP_KIB=65536
UNSURE=75                # exit status: the guard may be armed

fail() {
    echo "error $*"
    exit 1
}

unsure() {
    echo "error $*"
    exit "$UNSURE"
}

# -- what the guard is

state() {
    # In the order of their course: a state that is missed here is found as a later one.  A second restore goes
    # from restored back to restoring, so that is asked twice.
    for name in armed restoring restored confirmed restoring; do
        [ -e "$guard/$name" ] && { echo "$name"; return; }
    done
    echo none
}

report() {
    echo "state $(state)"
    [ ! -e "$guard/restored" ] || cat "$guard/restored"
}

# A guard that this login cannot see is not "none".
require_sight() {
    seen=$node_dir
    while [ -n "$seen" ] && [ ! -e "$seen" ]; do seen=${seen%/*}; done
    [ -r "${seen:-/}" ] && [ -x "${seen:-/}" ] || fail "the login cannot become root"
}

now() {
    read -r up rest < /proc/uptime
    echo "${up%%.*}"
}

# Prints a digest of a path's types, modes, owners, link targets and contents, or `absent`.
fingerprint() {
    if [ -d "$1" ] && [ ! -L "$1" ]; then
        (
            cd -- "$1" || exit
            find . -print0 | sort -z | xargs -0 -r stat -c '%f %u %g %N'
            find . -type f -print0 | sort -z | xargs -0 -r sha256sum
        ) | sha256sum | cut -d ' ' -f 1
    elif [ -L "$1" ]; then
        { stat -c '%f %u %g' -- "$1"; readlink -- "$1"; } | sha256sum | cut -d ' ' -f 1
    elif [ -e "$1" ]; then
        { stat -c '%f %u %g' -- "$1"; cat -- "$1"; } | sha256sum | cut -d ' ' -f 1
    else
        echo absent
    fi
}

# Prints the fingerprints of all guarded paths.
fingerprints() {
    while IFS= read -r path; do fingerprint "$path"; done < "$guard/paths"
}

# -- arm

require() {
    for tool in flock find sort xargs stat sha256sum readlink du cp mv timeout; do
        command -v "$tool" > /dev/null || fail "the node lacks the command $tool"
    done
    [ -d /run/systemd/system ] || command -v setsid > /dev/null || fail "the node has neither systemd nor setsid"
    [ -z "$across_reboot" ] || [ -d /run/systemd/system ] ||
        fail "the node has no systemd, so its guard does not last across a reboot"
    mkdir -p -- "$node_dir" 2> /dev/null || fail "$node_dir cannot be made; let the login become root"
    [ -O "$node_dir" ] && [ ! -L "$node_dir" ] && chmod 700 -- "$node_dir" ||
        fail "$node_dir belongs to another user"
}

# Whether this guard is newer than the newest one that the same database has armed here.
is_newest() {
    [ -e "$node_dir/newest" ] || return 0
    read -r seen_order seen_database rest < "$node_dir/newest"
    [ "$seen_database" = "$database" ] && [ "$rest" != "$token" ] || return 0
    [ "${order%%.*}" -gt "${seen_order%%.*}" ] && return 0
    [ "${order%%.*}" -eq "${seen_order%%.*}" ] && [ "${order#*.}" -gt "${seen_order#*.}" ]
}

# Ends the node's other guards: what was not confirmed is restored before a newer change is backed up.
end_others() {
    for other in "$node_dir"/*/; do
        other=${other%/}
        [ -d "$other" ] && [ "$other" != "$guard" ] || continue
        if [ -e "$other/armed" ] || [ -e "$other/restoring" ]; then
            # Its node was changed by others since the reboot, perhaps, so its backup is not what was before.
            [ "${other%.*}" = "${guard%.*}" ] || (guard=$other && is_watched) ||
                fail "an older guard lost its timer in a reboot; restore by \`sh $other/guard.sh expire $node_dir" \
                    "${other##*/} daemon now\`, or remove $other"
            sh "$other/guard.sh" expire "$node_dir" "${other##*/}" daemon now 9>&-
            [ ! -e "$other/armed" ] && [ ! -e "$other/restoring" ] || fail "an older guard still restores the node"
        fi
        (guard=$other && remove)
    done
}

remove() {
    stop_watching
    rm -rf -- "$guard"
}

# Prints the mode, owner and name of the directories above a path, from the outermost on.
parents() {
    [ -z "${1%/*}" ] || { parents "${1%/*}" && stat -L -c '%a %u:%g %n' -- "${1%/*}"; }
}

back_up() {
    remove
    mkdir -- "$guard" "$guard/backup" || fail "$guard cannot be made"
    number=0 size=0
    printf '%s\n' "$paths" | while IFS= read -r path; do
        number=$((number + 1))
        saved=$guard/backup/$number
        if [ -e "$path" ] || [ -L "$path" ]; then
            [ -f "$path" ] || [ -d "$path" ] || [ -L "$path" ] || fail "$path is not a file, a directory or a link"
            size=$((size + $(du -sk -- "$path" | cut -f 1)))
            [ "$size" -le "$MAX_BACKUP_KIB" ] || fail "the guarded paths are larger than $MAX_BACKUP_KIB KiB"
            cp -a -- "$path" "$saved" || fail "$path cannot be backed up"
            parents "$path" > "$saved.parents"
        fi
        mounts "$path" > "$saved.mounts"
        fingerprint "$path" > "$saved.sum"
        [ "$(fingerprint "$saved")" = "$(cat "$saved.sum")" ] || fail "$path changed while it was backed up"
        cat "$saved.sum" >> "$guard/sums"
    done || { rm -rf -- "$guard"; exit 1; }
    # What the restore writes is made now: it must not fail on a disk that has no inode then.
    for name in listed output record restore.lock; do : > "$guard/$name"; done
    printf '%s\n' "$paths" > "$guard/paths" &&
        printf '%s\n' "$commands" > "$guard/commands" &&
        printf '%s\n' "$body" > "$guard/guard.sh" &&
        echo "$after" > "$guard/after" &&
        printf '%s' "$across_reboot" > "$guard/across_reboot" &&
        cat "$guard"/backup/*.sum | sha256sum | cut -d ' ' -f 1 > "$guard/digest" ||
        fail "$guard cannot be written"
    echo "$order $database $token" > "$node_dir/newest"
}

extend() {
    # Whole seconds, rounded up: the silence lasts `after` at least.
    echo $(($(now) + $(cat "$guard/after") + 1)) > "$guard/deadline.new" &&
        mv -f -- "$guard/deadline.new" "$guard/deadline"
}

arm() {
    require
    exec 9> "$node_dir/lock"
    flock -w "$LOCK_WAIT_S" 9 || unsure "another guard is being armed on the node"
    if [ "$(state)" = none ]; then
        is_newest || fail "a newer guard was armed on the node; this one is too late"
        end_others
        back_up
        [ -z "$across_reboot" ] || enable_at_boot
        make_durable    # first: after a loss of power, what is armed must have its backup
        : > "$guard/armed"
        make_durable
        extend    # after what a slow disk delays: that is not the daemon's silence
        watch || { remove; fail "the node's timer cannot be started"; }
    fi
    renew
}

# Lets the answer outlast a loss of power: a confirmed guard that is armed again would be restored by the next one.
make_durable() {
    if [ -s "$guard/across_reboot" ]; then
        sync    # its unit is on another file system, perhaps
    else
        write_out "$node_dir"
    fi
}

# Only these files: to write all that a busy node has in memory takes minutes.
write_out() {
    find "$@" \( -type d -o -type f \) -exec sync -- {} + 2> /dev/null || sync
}

# -- the timer

unit() {
    echo "rolloutd-guard-$(printf '%s' "$guard" | sha256sum | cut -c 1-16)"
}

# Starts the restore detached from this login: `launch SUFFIX DELAY_S ARGUMENTS`.
launch() {
    suffix=$1 delay_s=$2
    shift 2
    set -- /bin/sh "$guard/guard.sh" expire "$node_dir" "$token" "$@"
    if [ -d /run/systemd/system ]; then
        # A failed unit of this name would refuse the new one.  By default, systemd may delay a timer by a minute.
        systemctl reset-failed "$(unit)$suffix.service" 2> /dev/null
        systemd-run --quiet --collect --unit="$(unit)$suffix" --on-active="${delay_s}s" \
            --timer-property=AccuracySec=100ms --property=Restart=on-failure --property=RestartSec=1s "$@"
    else
        setsid "$@" < /dev/null > /dev/null 2>&1 9>&- &
    fi
}

is_watched() {
    if [ -d /run/systemd/system ]; then
        systemctl -q is-active "$(unit).timer" || systemctl -q is-active "$(unit).service" ||
            systemctl -q is-active "$(unit)-boot.service"
    else
        { read -r pid < "$guard/watcher"; } 2> /dev/null && grep -qs "$guard/guard.sh" "/proc/$pid/cmdline"
    fi
}

# Returns once the timer runs.  systemd answers then; a process has to write its id, and until then the next
# call would start a second one.
watch() {
    is_watched || launch '' "$(cat "$guard/after")" timer || return
    [ ! -d /run/systemd/system ] || return 0
    waited=0
    while [ -e "$guard/armed" ] && ! is_watched; do
        [ "$waited" -lt "$START_WAITS" ] || return
        sleep 0.2 2> /dev/null || sleep 1
        waited=$((waited + 1))
    done
}

stop_watching() {
    [ -d /run/systemd/system ] || return 0
    # Not the service: it may be what runs this.
    systemctl stop "$(unit).timer" 2> /dev/null
    unit_file=/etc/systemd/system/$(unit)-boot.service
    if [ -e "$unit_file" ]; then
        systemctl disable "${unit_file##*/}" 2> /dev/null
        rm -f -- "$unit_file"
        systemctl daemon-reload
    fi
}

enable_at_boot() {
    unit_file=/etc/systemd/system/$(unit)-boot.service
    cat > "$unit_file" << END
[Unit]
Description=Guard of rolloutd, restores this node unless it is disarmed
RequiresMountsFor=$guard
[Service]
ExecStart=/bin/sh $guard/guard.sh boot $node_dir $token
Restart=on-failure
[Install]
WantedBy=multi-user.target
END
    systemctl daemon-reload && systemctl -q enable "${unit_file##*/}" && sync ||
        { remove; fail "the guard's unit cannot be enabled"; }
}

# Waits for the deadline, which a renewal moves, then restores: `expire CAUSE [now]`.
expire() {
    [ -n "${2:-}" ] || echo $$ > "$guard/watcher"
    # By the second, not until the deadline: renewals move it, and a disarm ends this.
    while [ -z "${2:-}" ] && [ -e "$guard/armed" ] && [ "$(now)" -lt "$(cat "$guard/deadline")" ]; do sleep 1; done
    mv -- "$guard/armed" "$guard/restoring" 2> /dev/null && echo "$1" > "$guard/cause"
    finish_restore "$1"
}

# -- restore

finish_restore() {
    [ -e "$guard/restoring" ] || return 0
    exec 8> "$guard/restore.lock"
    # A failure, so that systemd starts this again: what holds the lock may be killed before it has restored.
    flock -w "$LOCK_WAIT_S" 8 || return 1
    [ -e "$guard/restoring" ] || return 0
    {
        echo "by $(cat "$guard/cause" 2> /dev/null || echo timer)"
        echo "digest $(cat "$guard/digest")"
        restore_paths
        run_commands
        # People turn off a node that was cut off: what counts as restored must be on its disk.
        while IFS= read -r path; do [ ! -e "$path" ] || write_out "$path"; done < "$guard/paths"
    } > "$guard/record" 2> /dev/null
    # An interrupted restore lists what it restored in `listed`, so that the next one does not forget it.
    sort -u "$guard/listed" >> "$guard/record" 2> /dev/null
    # A command may write a guarded path.  The daemon asks after the end of the run, which might write it too.
    [ "$1" != daemon ] || { fingerprints > "$guard/sums.new" && mv -- "$guard/sums.new" "$guard/sums"; }
    cp -- "$guard/record" "$guard/restoring"
    mv -- "$guard/restoring" "$guard/restored"
    stop_watching
}

restore_paths() {
    number=0
    while IFS= read -r path; do
        number=$((number + 1))
        saved=$guard/backup/$number
        wanted=$(cat "$saved.sum")
        [ "$(fingerprint "$path")" != "$wanted" ] || continue
        if [ "$(fingerprint "$saved")" != "$wanted" ]; then
            echo "problem $path: its backup is damaged; restore it by hand"
            continue
        fi
        echo "restored $path" >> "$guard/listed"
        make_parents "$saved.parents"
        put_back "$saved" "$path"
        [ "$(fingerprint "$path")" = "$wanted" ] || echo "problem $path: it differs from its backup; restore it by hand"
    done < "$guard/paths"
}

make_parents() {
    while read -r mode owner directory; do
        [ ! -e "$directory" ] || continue
        mkdir -- "$directory" && chown -- "$owner" "$directory" && chmod -- "$mode" "$directory"
    done < "$1"
}

# Prints what is mounted at a path, as `.`, and below it.
mounts() {
    parent=$(cd -P -- "${1%/*}/" 2> /dev/null && pwd) || return 0
    real=$(printf '%s' "${parent%/}/${1##*/}" | sed 's/\\/\\134/g; s/ /\\040/g')
    while read -r device target rest; do
        case $target/ in "$real"/*) echo ".${target#"$real"}" ;; esac
    done < /proc/self/mounts
}

# Copies $1 to $2; where no space is left, as links.  There is no $2 if it would not be whole.
copy_whole() {
    for flags in -a -al; do
        cp "$flags" -- "$1" "$2"
        [ "$(fingerprint "$2")" != "$(cat "$1.sum")" ] || return 0
        rm -rf -- "$2"
    done
    return 1
}

# Makes $2 what $1 is; a file is replaced by one rename.
put_back() {
    new=$2.rolloutd-new old=$2.rolloutd-old
    case $(mounts "$2"),$(cat "$1.mounts") in
    ,* | .,.) ;;
    *)
        # A removal would take the files of what is mounted, so what was added stays.
        if [ -d "$1" ] && [ ! -L "$1" ]; then cp -a -- "$1/." "$2/"; fi
        return
        ;;
    esac
    rm -rf -- "$new" "$old"
    if [ ! -e "$1" ] && [ ! -L "$1" ]; then
        rm -rf -- "$2"
        return
    fi
    (umask 022 && mkdir -p -- "${2%/*}/")
    copy_whole "$1" "$new" || return
    if [ -f "$1" ] && [ -f "$2" ] && [ ! -L "$1" ] && [ ! -L "$2" ]; then
        mv -f -- "$new" "$2" || cp -a -- "$1" "$2"
    elif [ -d "$1" ] && [ -d "$2" ] && [ ! -L "$1" ] && [ ! -L "$2" ] && ! mv -- "$2" "$old"; then
        # A mount point cannot be renamed.
        find "$2" -mindepth 1 -maxdepth 1 -exec rm -rf -- {} +
        cp -a -- "$1/." "$2/"
    else
        [ ! -e "$2" ] && [ ! -L "$2" ] || mv -- "$2" "$old"
        mv -- "$new" "$2"
    fi
    rm -rf -- "$new" "$old"
}

run_commands() {
    # An older busybox has no -k.
    timeout -k 1 1 true 2> /dev/null || KILL_AFTER_S=
    while IFS= read -r line; do
        [ -n "$line" ] || continue
        (umask 022 && exec timeout ${KILL_AFTER_S:+-k "$KILL_AFTER_S"} "$COMMAND_LIMIT_S" sh -c "$line") < /dev/null >> "$guard/output" 2>&1 8>&-
        status=$?
        [ "$status" -eq 0 ] || echo "problem \`$line\` ended with $status"
    done < "$guard/commands"
}

# -- what the daemon asks

renew() {
    [ "$(state)" != armed ] || { extend && watch; } || unsure "the node's timer cannot be renewed"
}

disarm() {
    mv -- "$guard/armed" "$guard/confirmed" 2> /dev/null
    # An earlier disarm may have been interrupted here.
    [ -e "$guard/confirmed" ] || return 0
    stop_watching
    make_durable
    rm -rf -- "$guard/backup"
}

# Whether a path differs from its restore: a run that continued without the daemon changed it after that.
is_changed() {
    [ "$(fingerprints)" != "$(cat "$guard/sums")" ]
}

restore() {
    [ ! -e "$guard/restored" ] || ! is_changed || mv -- "$guard/restored" "$guard/restoring" 2> /dev/null
    case $(state) in armed | restoring) ;; *) return ;; esac
    launch -now 0 daemon now
    waited=0
    while [ "$waited" -lt "$RESTORE_WAITS" ]; do
        case $(state) in armed | restoring) sleep 0.2 2> /dev/null || sleep 1 ;; *) return ;; esac
        waited=$((waited + 1))
    done
}

# Removes the guards that have ended, and what orders guards, unless one is armed: `clean [dry-run]`.
clean() {
    [ -d "$node_dir" ] || return 0
    exec 9> "$node_dir/lock" || fail "$node_dir cannot be written; let the login become root"
    flock -w "$LOCK_WAIT_S" 9 || fail "a guard is being armed on the node"
    armed=
    for guard in "$node_dir"/*/; do
        guard=${guard%/}
        [ -d "$guard" ] || continue
        case $(state) in
        armed | restoring) armed=yes && echo "armed $guard" ;;
        *)
            [ -n "$1" ] || remove || fail "$guard cannot be removed"
            echo "ended $guard"
            ;;
        esac
    done
    [ -n "$1" ] || [ -n "$armed" ] || { rm -f -- "$node_dir/newest" "$node_dir/lock" && rmdir -- "$node_dir"; }
}

operation=$1 node_dir=$2 token=$3
shift 3
guard=$node_dir/$token
case $operation in
arm)
    after=$1 across_reboot=$2 order=$3 database=$4
    arm
    report
    ;;
renew | disarm | restore)
    require_sight
    "$operation"
    report
    ;;
inspect)
    require_sight
    report
    ;;
clean)
    require_sight
    clean "$1"
    ;;
expire) expire "$@" ;;
boot)
    case $(state) in armed) extend ;; restoring) ;; *) stop_watching ;; esac
    expire boot
    ;;
esac
