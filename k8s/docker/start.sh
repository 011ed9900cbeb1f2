#!/usr/bin/env bash
# k8s/docker/start.sh ROOT COMMAND...: run a command in the unpacked image ROOT (`buildah mount`) as a pod of k8s/ runs it, without
# Docker: uid 1000, no capabilities, no new privileges, the root file system read-only, /tmp and /dev/shm writable. Needs root.
set -euo pipefail
environment=$(dirname "$(realpath "$0")")/../base/ray.env
if [ "${INSIDE:-}" != 1 ]; then
  INSIDE=1 exec unshare --mount --pid --fork --kill-child "$0" "$@"
fi
root=$1 && shift
mount --bind "$root" "$root"
for folder in proc dev dev/shm tmp; do mkdir -p "$root/$folder"; done
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
mount -t tmpfs -o mode=1777,size=20g tmpfs "$root/tmp"
touch "$root/etc/resolv.conf" "$root/etc/hosts"
mount --bind /etc/resolv.conf "$root/etc/resolv.conf"
mount --bind /etc/hosts "$root/etc/hosts"
mount -o remount,bind,ro "$root"
mapfile -t variables < <(grep -v '^#' "$environment")
exec env -i PATH=/opt/manta/bin:/usr/local/bin:/usr/bin:/bin "${variables[@]}" /usr/sbin/chroot "$root" \
  setpriv --reuid 1000 --regid 1000 --clear-groups --no-new-privs --bounding-set=-all --inh-caps=-all "$@"
