# The stagers on a node: inspect, fetch, install, compare and remove artifacts.
#
# POSIX sh with sha256sum, shasum or openssl.  Everything is made under `.incoming` and renamed, so an
# artifact's directory is complete or absent, also after a crash.
LC_ALL=C; export LC_ALL
umask 022
action=$1 to=$2

fail() { echo "failed $*"; exit 0; }

digest() {
    if command -v sha256sum >/dev/null; then sha256sum <"$1" | cut -d ' ' -f 1
    elif command -v shasum >/dev/null; then shasum -a 256 <"$1" | cut -d ' ' -f 1
    else openssl dgst -sha256 -r <"$1" | cut -d ' ' -f 1
    fi
}

# Makes the directory that the login may write to: sudo names the login.
make_incoming() {
    mkdir -p "$incoming" || fail "cannot make $incoming"
    if [ "$(id -u)" = 0 ]; then
        chown "${SUDO_UID:-0}:${SUDO_GID:-0}" "$incoming" || fail "cannot own $incoming"
        chmod 0700 "$incoming"
    fi
}

set_rights() {
    [ -z "$owner" ] || chown -R "$owner" "$1" || fail "cannot give $1 to $owner"
    chmod "$mode" "$1/$name" || fail "cannot set the mode of $1/$name"
}

unpack() {
    mkdir "$2" || return
    case $kind,$1 in
    git,*) git clone -q "$1" "$2" ;;
    rootfs,*) tar --numeric-owner -xpf "$1" -C "$2" ;;
    *,*.zip) unzip -q "$1" -d "$2" ;;
    *) tar -xof "$1" -C "$2" ;;
    esac
}

# Moves a received file to its place, if it is the artifact.
place() {
    found=$(digest "$1")
    [ "$found" = "$sha256" ] || { rm -f "$1"; echo "altered $found"; exit 0; }
    new=$incoming/$sha256.$$
    trap 'rm -rf "$new"' EXIT
    mkdir "$new" && mv "$1" "$new/$name" || fail "cannot move $1"
    [ "$(id -u)" != 0 ] || chown 0:0 "$new" "$new/$name" || fail "cannot own $new"
    if [ "$unpacks" = 1 ]; then
        unpack "$new/$name" "$new/unpacked" || fail "cannot unpack $name"
    fi
    set_rights "$new"
    # What is unpacked is not compared later, so it must outlast a loss of power.
    [ "$unpacks" = 0 ] || sync -f "$new" 2>/dev/null || sync
    # A link could lead anywhere: what is behind it is not touched.
    if [ -h "$final" ] || { [ -e "$final" ] && [ ! -d "$final" ]; }; then
        rm -f "$final" || fail "cannot replace $final"
    fi
    if [ -d "$final" ]; then  # it lacks this name of the same bytes, or what is unpacked
        if [ -h "$final/$name" ] || [ -d "$final/$name" ]; then
            rm -rf "${final:?}/$name" || fail "cannot replace $final/$name"
        fi
        [ ! -h "$final/unpacked" ] || rm -f "$final/unpacked" || fail "cannot replace $final/unpacked"
        [ ! -d "$new/unpacked" ] || [ -d "$final/unpacked" ] || mv "$new/unpacked" "$final" ||
            fail "cannot make $final/unpacked"
        mv -f "$new/$name" "$final/$name" || fail "cannot make $final/$name"
    else
        # Not every mv has -T; without it, a directory that another call made meanwhile is kept.
        mv -T "$new" "$final" 2>/dev/null || [ -f "$final/$name" ] || mv "$new" "$final" ||
            fail "cannot make it"
    fi
    echo staged
}

fetch() {
    part=$incoming/$sha256.fetched.$$
    rm -f "$incoming/$sha256.fetched."*
    (
        # A mirror that sends more must not fill the disk; in blocks of 512 bytes.
        ulimit -f $((size / 512 + 1))
        if command -v curl >/dev/null; then curl -fsSL -o "$part" "$url"
        elif command -v wget >/dev/null; then wget -q -O "$part" "$url"
        else python3 -c 'import shutil, sys, urllib.request as r
shutil.copyfileobj(r.urlopen(sys.argv[1]), open(sys.argv[2], "wb"))' "$url" "$part"
        fi
    ) || { rm -f "$part"; fail "cannot fetch $url"; }
    place "$part"
}

# Prints `staged`, or `partial BYTES DIGEST` of an earlier transfer and how the copy in place differs.
inspect() {
    differs=
    if [ -h "$final" ] || [ -h "$final/$name" ]; then differs="is a symbolic link"
    elif [ -f "$final/$name" ]; then
        found=$(digest "$final/$name")
        if [ "$found" != "$sha256" ]; then differs="is altered: sha256 $found"
        elif [ "$unpacks" = 0 ] || { [ -d "$final/unpacked" ] && [ ! -h "$final/unpacked" ]; }; then
            set_rights "$final"
            echo staged
            exit 0
        fi
    elif [ -e "$final/$name" ]; then differs="is not a regular file"
    fi
    make_incoming
    free=$(df -Pk "$to" | awk 'NR == 2 { print $4 }')
    [ "${free:-0}" -gt $((size / 1024)) ] || fail "$to has $free KiB free, and $size bytes are needed"
    if [ -s "$part" ]; then
        echo "partial $(wc -c <"$part") $(digest "$part") $differs"
    else
        echo "partial 0 - $differs"
    fi
}

# Prints the device, inode, size and times of a file, where stat can.
stamp() { TZ=UTC stat -c '%d %i %s %y %z' -- "$1" 2>/dev/null; }

is_own_directory() { [ -d "$1" ] && [ ! -h "$1" ] && [ -O "$1" ]; }

# Returns whether the file is the one that was whole before: a change of its content changes its ctime, which
# no program can set back as they can its mtime.
is_remembered() {
    is_own_directory "${memory%/*}" && [ -f "$memory" ] && [ -O "$memory" ] && [ -n "$stamp" ] &&
        [ "$(cat "$memory" 2>/dev/null)" = "$stamp" ]
}

# Remembers a file that is whole.  One that changed in the seconds before may change again with the same ctime.
remember() {
    [ -n "$stamp" ] && [ "$(stamp "$1")" = "$stamp" ] || return 0
    changed=$(stat -c %Z -- "$1") && [ $((changed + 2)) -le "$2" ] || return 0
    [ -e "${memory%/*}" ] || mkdir -m 0700 "${memory%/*}" || return 0
    is_own_directory "${memory%/*}" && (umask 077; printf '%s\n' "$stamp" >"$memory")
    return 0
}

# Prints the number of a staged file and how it differs, or nothing: compare NUMBER SIZE FILE UNPACKED.
compare() {
    path=$3 directory=${3%/*} differs=
    sha256=${directory##*/} memory=${directory%/*}/.compared/${directory##*/}.${3##*/}
    if [ -h "$directory" ] || [ -h "$path" ]; then differs=link
    elif [ ! -e "$path" ]; then differs=missing
    elif [ ! -f "$path" ]; then differs=not-regular
    else
        stamp=$(stamp "$path")
        # Not every wc is as cheap as stat: some read the whole file.
        found=$(stat -c %s -- "$path" 2>/dev/null || wc -c <"$path" 2>/dev/null)
        if [ -z "$found" ]; then differs=unreadable
        elif [ $((found)) != "$2" ]; then differs="size $((found))"
        elif ! is_remembered; then
            began=$(date +%s) found=$(digest "$path" 2>/dev/null)
            if [ -z "$found" ]; then differs=unreadable
            elif [ "$found" != "$sha256" ]; then differs="digest $found"
            else remember "$path" "$began" 2>/dev/null
            fi
        fi
    fi
    if [ -z "$differs" ] && [ -n "$4" ]; then
        [ -d "$4" ] && [ ! -h "$4" ] || differs=not-unpacked
    fi
    [ -n "$differs" ] || return 0
    echo "$1 $differs"
    count=$((count + 1))
    if [ "$count" -ge "$limit" ]; then echo compared; exit 0; fi
}

# Returns whether a file system is mounted at or below a directory: a removal would take its files.
has_mounts() {
    real=$(cd -P -- "$1" 2>/dev/null && pwd | sed 's/\\/\\134/g; s/ /\\040/g')
    while [ -n "$real" ] && read -r device target rest; do
        case $target/ in "$real"/*) return 0 ;; esac
    done </proc/self/mounts
    return 1
}

# Removes the artifacts with these digests, what was received of them, and transfers that ended a week ago.
remove() {
    for found in $digests; do
        case $found in *[!0-9a-f]*) continue ;; esac
        [ ${#found} = 64 ] || continue
        ! has_mounts "$to/$found" || fail "a file system is mounted in $to/$found"
        rm -rf "$to/$found" || fail "cannot remove $to/$found"
        rm -rf "$to"/.incoming/*/"$found" "$to"/.incoming/*/"$found".* "$to"/.compared/"$found".* ||
            fail "cannot remove it"
    done
    find "$to"/.incoming/*/* -prune -mtime +7 -exec rm -rf {} + 2>/dev/null
    rmdir "$to"/.incoming/* "$to/.incoming" "$to/.compared" "$to" 2>/dev/null
    echo removed
}

if [ "$action" = remove ]; then digests=$3; remove; exit 0; fi
if [ "$action" = compare ]; then
    limit=$2 count=0
    compare_all
    echo compared
    exit 0
fi
sha256=$3 name=$4 size=$5 mode=$6 owner=$7 kind=$8 unpacks=$9
shift 9
node=$1 url=$2
incoming=$to/.incoming/$node final=$to/$sha256
part=$incoming/$sha256
case $action in
inspect) inspect ;;
install) place "$part" ;;
fetch) fetch ;;
esac
