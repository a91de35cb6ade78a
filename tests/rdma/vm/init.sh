#!/bin/busybox sh
# The guest's first process: the machine's root, read-only, under what was preloaded of it and a layer in memory;
# Soft-RoCE over a network device that leads nowhere; then /job/command, whose status goes to /job/status.
b=/bin/busybox
finish() { echo "guest: $1"; $b sync; $b poweroff -f; }
seconds() { $b cut -d' ' -f1 /proc/uptime; }

$b mount -t proc proc /proc
$b mount -t sysfs sysfs /sys
$b mount -t devtmpfs devtmpfs /dev
for module in /modules/*.ko; do
    $b insmod "$module" || echo "guest: $module was not loaded"
done

share="trans=virtio,version=9p2000.L,msize=524288"
$b mount -t 9p -o "ro,cache=loose,$share" root /host || finish "the machine's root cannot be mounted"
$b mount -t tmpfs -o size=75% tmpfs /changes
$b mkdir /changes/upper /changes/work
$b mount -t overlay -o lowerdir=/preloaded:/host,upperdir=/changes/upper,workdir=/changes/work overlay /machine \
    || finish "no layer over the machine's root"
for folder in proc sys dev; do $b mount --bind "/$folder" "/machine/$folder"; done
$b mkdir -p /machine/dev/shm /machine/dev/pts /machine/job
# Not over /tmp, where the checkout may be: the layer keeps what is written there.
for folder in dev/shm run; do $b mount -t tmpfs tmpfs "/machine/$folder"; done
$b chmod 1777 /machine/tmp /machine/dev/shm
$b mount -t devpts devpts /machine/dev/pts
$b mount -t 9p -o "rw,$share" job /machine/job || finish "the job's folder cannot be mounted"

# 4200: a payload of 4096 bytes and its headers. The IPv6 address makes a second GID to choose from.
$b ip link set lo up
$b ip link add rdma0 type dummy 2>/dev/null
$b ip link set rdma0 mtu 4200 up
$b ip addr add 10.77.0.1/24 dev rdma0
$b chroot /machine /usr/bin/env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root \
    LANG=C.UTF-8 SALTERN_RDMA_VM=1 PYTHONDONTWRITEBYTECODE=1 /bin/bash -c '
        ulimit -l unlimited
        rdma link add rxe0 type rxe netdev rdma0 || exit 98
        read -r up _ </proc/uptime; echo "guest: Soft-RoCE is ready after $up s, kernel $(uname -r)"
        cd /job && exec bash ./command' </dev/null
echo $? >/machine/job/status
finish "done after $(seconds) s"
