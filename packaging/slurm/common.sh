# shellcheck shell=sh
# What prolog, epilog and health-check have in common; read by them, not run. POSIX sh.
#
# They never make a job or a node fail because gpureap is missing or cannot do its work: then they say so in the system's log, and
# the job goes on. A node is drained for one reason alone, that a GPU is not free, and the reason names who holds it.
#
# Settings, in /etc/gpureap/slurm.env (sh, root's):
#   GPUREAP              the program [gpureap]
#   GPUREAP_GRACE        between TERM and KILL for what a job left behind [5s]
#   GPUREAP_TIMEOUT      for the GPUs to be free after the last signal [30s]
#   GPUREAP_LIMIT        seconds after which a gpureap that hangs is killed [60; 20 in the health check]
#   GPUREAP_DEADLINE     seconds that prolog and epilog have for all that they ask gpureap [120; 25 in the health check, always]
#   GPUREAP_MATCH        attached or any: which handles count on a job's GPUs [attached]
#   GPUREAP_WHOLE_NODE   yes: nodes are given to one job at a time, all GPUs are freed after each. no: they are not.
#                        ask: asks slurmctld for each job (OverSubscribe=NO) [ask]
#   GPUREAP_SHARED_GPUS  yes: several jobs use one GPU at a time (MIG, MPS, shards); only the job's own processes count [no]
#   GPUREAP_STATE        why gpureap drained the node, and what the health check saw last time [/var/lib/gpureap/slurm]
#   SLURM_CONF           as Slurm's commands read it

: "${role:=slurm}"
PATH=${PATH:+$PATH:}/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
export PATH

# Words for the system's log; on stderr where there is no logger.
say() {
    logger -t "gpureap-$role" -- "$*" 2>/dev/null || printf 'gpureap-%s: %s\n' "$role" "$*" >&2
}

GPUREAP=gpureap
GPUREAP_GRACE=5s
GPUREAP_TIMEOUT=30s
GPUREAP_LIMIT=60
GPUREAP_DEADLINE=120
# shellcheck disable=SC2034 # used by the scripts
GPUREAP_MATCH=attached
GPUREAP_WHOLE_NODE=ask
# shellcheck disable=SC2034 # used by the scripts
GPUREAP_SHARED_GPUS=no
GPUREAP_STATE=/var/lib/gpureap/slurm
settings=${GPUREAP_SLURM_ENV:-/etc/gpureap/slurm.env}
if [ -r "$settings" ]; then
    # sh itself leaves at a quote that is not closed, and Slurm drains every node where that happens.
    if sh -n "$settings" 2>/dev/null; then
        # shellcheck source=/dev/null
        . "$settings"
    else
        say "$settings is no sh; the defaults hold"
    fi
fi
if [ -n "${SLURM_CONF:-}" ]; then
    export SLURM_CONF
fi

# Ends the script well where there is nothing to work with.
require_gpureap() {
    if ! command -v "$GPUREAP" >/dev/null 2>&1; then
        say "$GPUREAP is not installed; nothing is checked"
        exit 0
    fi
}

# Seconds since the boot: no clock that is set can move a deadline.
uptime_s() {
    read -r seconds _ </proc/uptime
    printf '%s\n' "${seconds%%.*}"
}

# A number of seconds ($2, of the setting $1) that sh can reckon with, else the default ($3).
seconds_or() {
    case $2 in
        '' | 0* | *[!0-9]* | ???????*)
            say "$1=$2 is no number of seconds; it is $3"
            printf '%s\n' "$3"
            ;;
        *) printf '%s\n' "$2" ;;
    esac
}

GPUREAP_LIMIT=$(seconds_or GPUREAP_LIMIT "$GPUREAP_LIMIT" 60)
GPUREAP_DEADLINE=$(seconds_or GPUREAP_DEADLINE "$GPUREAP_DEADLINE" 120)
if [ "$role" = health-check ]; then
    # Slurm kills it after 60 s: 25, 5 for a gpureap that does not end, and 24 for two questions to slurmctld.
    GPUREAP_DEADLINE=25
    if [ "$GPUREAP_LIMIT" -gt 20 ]; then
        GPUREAP_LIMIT=20
    fi
fi
deadline=$(($(uptime_s) + GPUREAP_DEADLINE))

# gpureap with a limit on its time, for it must not keep slurmd waiting: 124 and 137 where that was reached.
bounded() {
    left=$((deadline - $(uptime_s)))
    if [ "$left" -le 0 ]; then
        return 124
    fi
    if [ "$left" -gt "$GPUREAP_LIMIT" ]; then
        left=$GPUREAP_LIMIT
    fi
    timeout -k 5 "$left" "$GPUREAP" -q "$@" </dev/null
}

# Ends with the code of `reap`, whose report is of no interest here: the check that follows says who is left.
reap() {
    bounded reap --grace "$GPUREAP_GRACE" --timeout "$GPUREAP_TIMEOUT" --yes "$@" >/dev/null
    code=$?
    case $code in
        0 | 3 | 4 | 5 | 6) ;;
        *) say "gpureap reap $* ended with $code" ;;
    esac
    return "$code"
}

# slurmctld may be away or slow.
slurm() {
    timeout -k 2 10 "$@" 2>/dev/null
}

# The jobs that run here, with commas between them; asks slurmd alone. Fails where that does not answer: nobody can be told from
# whom a job left behind then.
running_jobs() {
    listing=$(timeout -k 2 10 scontrol listpids 2>&1) || case $listing in
        *"No job steps"*) listing= ;;
        *) return 1 ;;
    esac
    printf '%s\n' "$listing" | awk '$1 ~ /^-?[0-9]+$/ && $2 ~ /^[0-9]+$/ && !seen[$2]++ { printf "%s%s", (n++ ? "," : ""), $2 }'
}

# Whether this job has the node for itself.
has_whole_node() {
    case $GPUREAP_WHOLE_NODE in
        yes) return 0 ;;
        ask) ;;
        *) return 1 ;;
    esac
    case $(slurm scontrol -o show job "$SLURM_JOB_ID") in
        *" OverSubscribe=NO "*) return 0 ;;
        *) return 1 ;;
    esac
}

# `--gpu N` for each GPU of the job (SLURM_JOB_GPUS: 0,1,4-7), N as in /dev/nvidiaN; nothing where it has none.
gpus_of_job() {
    printf '%s\n' "${SLURM_JOB_GPUS:-}" | tr ',' '\n' | awk -F- '
        /^[0-9]+$/ { printf "--gpu %d ", $1 }
        /^[0-9]+-[0-9]+$/ { for (n = $1; n <= $2 && n < $1 + 256; n++) printf "--gpu %d ", n }'
}

# What slurmctld says of this node: its state and the reason for it. The reason holds names that processes gave themselves, spaces
# and `=` among them, so nothing that comes after its beginning is a field.
node_state() {
    node=$(slurm scontrol -o show node "${SLURMD_NODENAME:-}") || return 1
    state=${node%% Reason=*}
    case $state in
        *" State="*)
            state=${state#* State=}
            state=${state%% *}
            ;;
        *) return 1 ;;
    esac
    case $node in
        *" Reason="*) reason=${node#* Reason=} ;;
        *) reason= ;;
    esac
}

# Whether the node is drained, and gpureap gave the reason. After node_state.
is_drained_by_gpureap() {
    case $state in
        *DRAIN*) ;;
        *) return 1 ;;
    esac
    case $reason in
        "gpureap: "*) ;;
        *) return 1 ;;
    esac
}

pid_in() {
    printf '%s\n' "$1" | sed -n 's/.*(pid \([0-9]*\),.*/\1/p'
}

# Takes the node from the scheduler, with the reason ($1), and remembers that it was gpureap and what it had asked ($2, arguments of
# `check`; nothing where the health check asks that anyway). Whoever drained it before for another reason wants it drained when the
# GPU is free again.
drain() {
    if ! node_state; then
        say "slurmctld does not answer, so ${SLURMD_NODENAME:-this node} is not drained: $1"
        return
    fi
    if is_drained_by_gpureap; then
        remember "$2"
        # Of a process that was killed and whose memory was taken nobody can read any more which job's it is: the first reason
        # says more.
        case $reason in
            *"(pid $(pid_in "$1"),"*) return ;;
        esac
    else
        case $state in
            *DRAIN*)
                say "is drained already ($reason): $1"
                return
                ;;
        esac
    fi
    # Before it is drained: a health check that runs now must not take it back for an older question.
    remember "$2"
    if slurm scontrol update "NodeName=$SLURMD_NODENAME" State=DRAIN "Reason=gpureap: $1"; then
        say "drained $SLURMD_NODENAME: $1"
        # Again, for one that looked before it was drained has forgotten it.
        remember "$2"
    else
        say "scontrol could not drain $SLURMD_NODENAME: $1"
    fi
}

# One line for each question in $GPUREAP_STATE/drained.
remember() (
    make_state || return
    drained=$GPUREAP_STATE/drained
    if ! grep -qxFe "$1" "$drained" 2>/dev/null; then
        printf '%s\n' "$1" >>"$drained"
    fi
)

make_state() {
    umask 077
    mkdir -p "$GPUREAP_STATE"
}

# Drains where a check has found something. $1: its exit code, $2: what it said, $3: what it was asked, as for drain.
drain_if_held() {
    case $1 in
        0) ;;
        3 | 4) drain "$2" "$3" ;;
        *) say "gpureap check ended with $1; the node is left as it is" ;;
    esac
}
