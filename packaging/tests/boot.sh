#!/bin/bash
# What the package does under a systemd that really booted: `cargo xtask dist --boot` starts it as a unit, in a Debian with
# /packages/LOWER.deb installed already. Answers on the second serial port: `ok: WHAT`, `WRONG: WHAT`, `record: NAME VALUE`, and
# at the end `success` or `failure`.
set -uo pipefail
exec >/dev/ttyS1 2>&1 </dev/null
export DEBIAN_FRONTEND=noninteractive LC_ALL=C.UTF-8 PATH=/usr/sbin:/usr/bin:/sbin:/bin

package=/packages/gpureap.deb
pins=/sys/fs/bpf/gpureap
device=/dev/full

ok() { echo "ok: $*"; }
finish() {
    echo "$1"
    # What is in the port's buffer would be lost when the power goes.
    sleep 1
    systemctl poweroff --force --force
    exit
}
wrong() {
    echo "WRONG: $*"
    systemctl status gpureap.service --no-pager --full | head -n 30
    journalctl --no-pager --quiet --unit gpureap.service --lines 40
    finish failure
}
# until SECONDS COMMAND…: waits for it to succeed.
until_true() {
    local end=$((SECONDS + $1))
    shift
    until "$@"; do
        ((SECONDS < end)) || return 1
        sleep 0.3
    done
}
apt() { apt-get -y -q -o Dpkg::Use-Pty=0 "$@" >/tmp/apt.log 2>&1 || { cat /tmp/apt.log; wrong "apt-get $*"; }; }
show() { systemctl show --property "$1" --value "${2:-gpureap.service}"; }
is_active() { [[ $(show ActiveState) == active ]]; }
said() { journalctl --sync && journalctl --quiet --unit gpureap.service | grep -q "$1"; }
is_down() { [[ $(show MainPID) == 0 ]]; }
is_gone() { ! systemctl cat gpureap.service >/dev/null 2>&1; }
another_daemon() { is_active && [[ $(show MainPID) != "$1" && $(show MainPID) != 0 ]]; }
# A job that holds the device; its pid is in the variable named.
hold() {
    setsid bash -c "exec 9<>$device; echo; exec sleep 100000" >/tmp/held &
    printf -v "$1" %s $!
    until_true 10 test -s /tmp/held || wrong "no job holds $device"
    rm /tmp/held
}
# What the tracer says of a holder: how it knows it, and since when. A hold that was lost and found again would have another origin.
held() { gpureap holders --json | jq -c --argjson pid "$1" \
    '[.source, .backend, .complete, (.holders[] | select(.pid == $pid) | [.origin, .devices[0].first_open, .devices[0].fds])]'; }
is_free_of() { [[ $(held "$1") == '["map","kprobe",true]' ]]; }
must_hold() { [[ $(held "$1") == "$2" ]] || wrong "$3: the holder is $(held "$1"), not $2"; }
traced() { [[ $(held "$1") == '["map","kprobe",true,["traced",'*',1]]' ]]; }
sets() { ls -di $pins/abi* $pins/abi*/*; }

# Indexing the man pages after each step takes minutes in an emulated machine.
rm -f /var/lib/man-db/auto-update
echo "booted: $(uname -r), $(systemctl --version | head -n 1)"

# ---- After the boot ----
until_true 120 is_active || wrong "the unit was enabled, and is not active after the boot"
[[ $(show StatusText) == "kprobe, 1 devices" ]] || wrong "it told systemd \"$(show StatusText)\""
ok "the enabled unit runs after the boot, has said that it is ready, and traces with kprobe"
job="" second="" third=""
hold job
until_true 10 traced "$job" || wrong "the job is not traced: $(held "$job")"
since=$(held "$job")
ok "holders says who opened the device, from the maps"
[[ $(setpriv --reuid nobody --regid nogroup --clear-groups gpureap holders --json | jq -c '[.source, .holders[0].pid]') == "[\"map\",$job]" ]] ||
    wrong "a user does not see it through the socket"
ok "a user sees it through the socket"

# ---- The sandbox, from outside ----
pid=$(show MainPID)
[[ $(sed -n 's/^NoNewPrivs:\t//p;s/^Seccomp:\t//p' "/proc/$pid/status" | tr '\n' ' ') == "1 2 " ]] || wrong "no_new_privs or the filter is missing"
# CAP_DAC_READ_SEARCH, CAP_SYS_PTRACE, CAP_SYS_ADMIN, CAP_SYSLOG
[[ $(sed -n 's/^CapBnd:\t//p' "/proc/$pid/status") == $(printf %016x $((1 << 2 | 1 << 19 | 1 << 21 | 1 << 34))) ]] || wrong "another bounding set"
touch /tmp/of-the-host /root/of-the-host /home/of-the-host
inside() { nsenter --target "$pid" --mount -- "$@"; }
inside touch /usr/bin/x 2>/dev/null && wrong "/usr is writable there"
inside touch /etc/x 2>/dev/null && wrong "/etc is writable there"
inside touch /var/x 2>/dev/null && wrong "/var is writable there"
inside touch /var/lib/gpureap/x || wrong "its own state is not writable there"
rm /var/lib/gpureap/x
for directory in /tmp /root /home; do
    inside ls -A $directory | grep -q . && wrong "it sees what is in the host's $directory"
done
[[ $(stat -c '%a %U' /run/gpureap /var/lib/gpureap | tr '\n' ' ') == "755 root 750 root " ]] || wrong "its directories: $(stat -c '%a %U' /run/gpureap /var/lib/gpureap)"
ok "of the file system it can write what it keeps, and sees neither homes nor the host's /tmp"
# What the filter forbids, asked of a unit that has everything but the daemon in common.
mkdir -p /run/systemd/system/probe.service.d
sed 's/^ExecStart=.*/ExecStart=/' /usr/lib/systemd/system/gpureap.service >/run/systemd/system/probe.service
cat >/run/systemd/system/probe.service.d/probe.conf <<END
[Service]
Type=oneshot
WatchdogSec=0
Restart=no
RuntimeDirectory=probe
StateDirectory=probe
ExecStart=/usr/bin/perl -e 'sub tried { my \$n = shift; my \$r = syscall(\$n, @_); print \$r < 0 ? int(\$!) : "allowed", "\\\\n" } \
tried(9, 0, 4096, 7, 34, -1, 0); tried(272, 0x40000000); tried(272, 0x10000000); tried(175, 0, 0, 0); tried(41, 2, 1, 0); tried(41, 1, 1, 0)'
END
systemctl daemon-reload
systemctl start probe.service || wrong "the unit cannot run perl: $(journalctl --quiet --no-pager -u probe.service -n 5)"
journalctl --sync
# mmap of memory to write and execute; a network and a user namespace; init_module; an IP socket, a unix socket.
said=$(journalctl --quiet --output cat --unit probe.service _COMM=perl | tr '\n' ' ')
[[ $said == "1 1 1 1 97 allowed " ]] || wrong "mmap, unshare, unshare, init_module, socket, socket said: $said"
ok "memory to execute, namespaces, modules and IP sockets are refused"
echo "record: exposure $(systemd-analyze security gpureap.service --no-pager | sed -n 's/^.*Overall exposure level for gpureap.service: \([0-9.]*\) .*/\1/p')"
cgroup=/sys/fs/cgroup$(show ControlGroup)
echo "record: memory.peak $(cat "$cgroup/memory.peak")"
echo "record: memory.current $(cat "$cgroup/memory.current")"
echo "record: pids.current $(cat "$cgroup/pids.current")"
(($(cat "$cgroup/memory.peak") < $(cat "$cgroup/memory.max") / 2)) || wrong "it needs more than half of MemoryMax"
(($(cat "$cgroup/pids.current") < $(cat "$cgroup/pids.max") / 2)) || wrong "it needs more than half of TasksMax"
ok "it needs less than half of MemoryMax and TasksMax"

# ---- Its end, and a new beginning ----
made=$(sets)
drop_in() {
    mkdir -p /run/systemd/system/gpureap.service.d
    printf '[Service]\n%s\n' "$1" >/run/systemd/system/gpureap.service.d/test.conf
    systemctl daemon-reload
}
# Time enough to open the device while no daemon runs.
drop_in RestartSec=10
systemctl kill --signal KILL gpureap.service
until_true 10 is_down || wrong "KILL did not end it"
hold second
is_down || wrong "the test was too slow: a daemon runs already"
until_true 60 another_daemon "$pid" || wrong "it was killed, and was not started again"
[[ $(show NRestarts) == 1 ]] || wrong "NRestarts is $(show NRestarts)"
must_hold "$job" "$since" "after KILL"
traced "$second" || wrong "who opened while no daemon ran: $(held "$second")"
[[ $(sets) == "$made" ]] || wrong "the pins are others"
ok "killed, it is started again; no hold is lost, nor one that began meanwhile"
kill "$second"
until_true 10 is_free_of "$second" || wrong "who has ended is still shown"

drop_in $'ExecStart=\nExecStart=/usr/bin/gpureap --verbose daemon --keep\nWatchdogSec=8'
systemctl restart gpureap.service || wrong "systemctl restart"
must_hold "$job" "$since" "after a restart"
[[ $(sets) == "$made" ]] || wrong "the pins are others"
until_true 20 said "tracing 1 devices with kprobe, adopted from pins" || wrong "it did not take the pins over"
ok "a restart loses no hold"
pid=$(show MainPID)
systemctl reload gpureap.service || wrong "systemctl reload"
until_true 20 said "the device table was read again as asked" || wrong "a reload was not heard"
[[ $(show MainPID) == "$pid" ]] || wrong "a reload is a restart"
ok "systemctl reload is heard"
sleep 20
[[ $(show MainPID) == "$pid" && $(show NRestarts) == 0 ]] || wrong "a healthy daemon did not feed the watchdog: $(show MainPID) after $pid"
kill -STOP "$pid"
stopped=$SECONDS
until_true 60 another_daemon "$pid" || wrong "the watchdog did not end a daemon that stood still"
echo "record: watchdog $((SECONDS - stopped)) s with WatchdogSec=8"
until_true 20 said "Watchdog timeout" || wrong "it was not the watchdog"
must_hold "$job" "$since" "after the watchdog"
ok "the watchdog leaves a healthy daemon alone and ends one that stands still; no hold is lost"
rm -r /run/systemd/system/gpureap.service.d
systemctl daemon-reload

# ---- The package ----
pid=$(show MainPID)
apt install "$package"
another_daemon "$pid" || wrong "an upgrade does not restart the daemon"
must_hold "$job" "$since" "after an upgrade"
[[ $(sets) == "$made" ]] || wrong "the pins are others"
hold third
until_true 10 traced "$third" || wrong "after an upgrade: $(held "$third")"
kill "$third"
ok "an upgrade restarts the daemon and loses no hold"

# Held until the power goes, as a fence would be.
gpureap fence --ttl 1h >/dev/null || wrong "gpureap fence"
[[ -d $pins/fence ]] || wrong "the fence is not pinned"
(: <>$device) 2>/dev/null && wrong "the fence does not stand"
apt remove gpureap
[[ ! -e $pins && ! -e /run/gpureap ]] || wrong "remove left $(ls -d $pins /run/gpureap 2>&1)"
(: <>$device) || wrong "the fence stands, and nobody can lift it"
[[ -e /etc/gpureap/config.toml && -e /var/lib/gpureap/journal.db ]] || wrong "remove took the configuration or the journal"
[[ $(show ActiveState) == inactive ]] || wrong "after a remove the unit is $(show ActiveState)"
ok "remove ends the daemon, its kernel programs and a fence; the configuration and the journal stay"
apt purge gpureap
left=$(ls -d /etc/gpureap /var/lib/gpureap /run/gpureap $pins /etc/systemd/system/*/gpureap.service 2>/dev/null)
[[ -z $left ]] || wrong "purge left $left"
systemctl daemon-reload
until_true 10 is_gone || wrong "systemd still knows the unit"
ok "purge leaves nothing"

# ---- A newcomer ----
# With a device there, by a configuration that the package did not bring.
mkdir -p /etc/gpureap
printf '[[device]]\nkind = "standin"\nmajor = 1\nminor = 7\nnode = "%s"\n' $device >/etc/gpureap/config.toml
apt install -o Dpkg::Options::=--force-confold "$package"
is_active || wrong "after apt install the daemon does not run"
[[ $(held "$job") == '["map","kprobe",true,["snapshot",'*',1]]' ]] || wrong "who held before the install: $(held "$job")"
ok "after apt install the daemon runs, and whoever held before is found"
cp /usr/share/doc/gpureap/examples/config.toml /etc/gpureap/config.toml
systemctl restart gpureap.service || wrong "the daemon does not start with the shipped configuration"
[[ $(show StatusText) == "kprobe, 0 devices" ]] || wrong "it told systemd \"$(show StatusText)\""
gpureap holders 2>&1 | grep -q "This host has no NVIDIA device" || wrong "without a device holders says $(gpureap holders 2>&1)"
ok "with the shipped configuration, on a host without a driver, the daemon waits for one"
finish success
