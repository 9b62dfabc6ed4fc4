#!/bin/bash
# Installs, upgrades, removes and purges the package in a Debian that holds nothing else, without systemd as its first
# process. `cargo xtask dist --test` runs it there. Its lines: `ok: WHAT`, or one that says what is wrong, and exit 1.
#
#   install.sh LOWER.deb PACKAGE.deb VERSION-OF-THE-PROGRAM
set -euo pipefail

lower=$1 package=$2 version=$3
export DEBIAN_FRONTEND=noninteractive LC_ALL=C.UTF-8 PATH=/usr/sbin:/usr/bin:/sbin:/bin

ok() { echo "ok: $*"; }
wrong() {
    echo "WRONG: $*"
    exit 1
}
# apt talks a lot, and is read only where something is wrong.
apt() { apt-get -y -q -o Dpkg::Use-Pty=0 "$@" >/tmp/apt.log 2>&1 || { cat /tmp/apt.log; wrong "apt-get $*"; }; }
state() { dpkg-query -W -f '${db:Status-Abbrev}${Version}' gpureap 2>/dev/null || true; }
# Everything on the disk but what dpkg, apt, man-db and systemd keep for themselves.
everything() {
    find / -xdev \( -path /var/lib/dpkg -o -path /var/log -o -path /var/cache -o -path /var/lib/apt -o -path /tmp \
        -o -path /packages -o -path /run/systemd -o -path /var/lib/systemd/deb-systemd-helper-enabled \) -prune -o -printf '%p %y %m %U:%G\n' | sort
}

everything >/tmp/before

apt install "$lower"
[[ $(state) == "ii "* ]] || wrong "after the install: $(state)"
ok "apt install resolves what a fresh Debian has"
[[ $(gpureap --version) == "gpureap $version" ]] || wrong "it says it is $(gpureap --version)"
ok "the program runs"

while read -r mode path; do
    [[ $(stat -L -c '%a %U:%G' "$path") == "$mode root:root" ]] || wrong "$path: $(stat -L -c '%a %U:%G' "$path" 2>&1)"
    [[ $(dpkg -S "$path") == gpureap:* ]] || wrong "$path is not the package's"
done <<END
755 /usr/bin/gpureap
644 /usr/lib/systemd/system/gpureap.service
755 /usr/libexec/gpureap/slurm/prolog
755 /usr/libexec/gpureap/slurm/epilog
755 /usr/libexec/gpureap/slurm/health-check
644 /usr/share/doc/gpureap/packaging/prometheus/alerts.yml
644 /etc/gpureap/config.toml
644 /usr/share/man/man1/gpureap.1.gz
644 /usr/share/man/man1/gpureap-reap.1.gz
644 /usr/share/bash-completion/completions/gpureap
644 /usr/share/zsh/vendor-completions/_gpureap
644 /usr/share/fish/vendor_completions.d/gpureap.fish
644 /usr/share/doc/gpureap/copyright
644 /usr/share/doc/gpureap/third-party.gz
644 /usr/share/doc/gpureap/changelog.gz
644 /usr/share/doc/gpureap/changelog.Debian.gz
644 /usr/share/doc/gpureap/README.md
644 /usr/share/doc/gpureap/docs/install.md
644 /usr/share/doc/gpureap/docs/schema/holders-1.json
644 /usr/share/doc/gpureap/examples/config.toml
END
ok "files are where they belong, with root as their owner"
[[ $(dpkg-query -W -f '${Conffiles}' gpureap) == *" /etc/gpureap/config.toml "* ]] || wrong "the configuration is no conffile"
dpkg --verify gpureap >/tmp/verify || wrong "$(cat /tmp/verify)"
ok "the configuration is a conffile, and all sums are right"
cmp /etc/gpureap/config.toml /usr/share/doc/gpureap/examples/config.toml
[[ $(gpureap holders --json | jq -r .schema) == gpureap.holders/* ]] || wrong "the installed configuration is not read"
ok "the program reads the installed configuration"
[[ -L /etc/systemd/system/multi-user.target.wants/gpureap.service ]] || wrong "the unit is not enabled"
systemd-analyze verify --recursive-errors=no gpureap.service 2>/tmp/verify || wrong "$(cat /tmp/verify)"
[[ ! -s /tmp/verify ]] || wrong "$(cat /tmp/verify)"
ok "the unit is enabled, and systemd understands all of it"

for page in /usr/share/man/man1/gpureap*.1.gz; do
    MANPAGER="cat" man --warnings -l "$page" >/tmp/page 2>/tmp/warnings || wrong "man $page: $(cat /tmp/warnings)"
    [[ ! -s /tmp/warnings ]] || wrong "man $page: $(cat /tmp/warnings)"
done
MANPAGER="cat" man gpureap-reap >/tmp/page
grep -q 'gpureap reap --gpu 0 --dry-run' /tmp/page || wrong "man gpureap-reap has no example"
ok "man pages render without a warning"

# shellcheck disable=SC2016 # for the other shell
complete_words='
    . /usr/share/bash-completion/bash_completion
    _completion_loader gpureap || [ $? = 124 ]
    COMP_WORDS=(gpureap hold) COMP_CWORD=1
    $(complete -p gpureap | sed "s/.* -F \([^ ]*\) .*/\1/") gpureap hold gpureap
    echo "${COMPREPLY[*]}"'
[[ $(bash -c "$complete_words") == holders ]] || wrong "bash completes \"gpureap hold\" to \"$(bash -c "$complete_words")\""
ok "bash completes the commands"

echo '# of the administrator' >>/etc/gpureap/config.toml
systemctl disable gpureap.service >/dev/null 2>&1
apt install "$package"
[[ $(state) == "ii $version"* ]] || wrong "after the upgrade: $(state)"
grep -q '^# of the administrator' /etc/gpureap/config.toml || wrong "the upgrade took the administrator's lines away"
[[ ! -e /etc/systemd/system/multi-user.target.wants/gpureap.service ]] || wrong "the upgrade enabled what had been disabled"
systemctl enable gpureap.service >/dev/null 2>&1
ok "an upgrade keeps the configuration, and whether the unit is enabled"

mkdir -p /var/lib/gpureap
touch /var/lib/gpureap/journal.db
apt remove gpureap
[[ -e /etc/gpureap/config.toml && -e /var/lib/gpureap/journal.db ]] || wrong "remove took the configuration or the journal"
[[ ! -e /usr/bin/gpureap && ! -e /usr/share/doc/gpureap ]] || wrong "remove left files"
ok "remove leaves the configuration and the journal alone"

apt purge gpureap
[[ $(state) == "" || $(state) == "un "* ]] || wrong "after the purge: $(state)"
everything >/tmp/after
diff /tmp/before /tmp/after || wrong "purge left something, or took too much (above)"
ok "purge leaves nothing"
