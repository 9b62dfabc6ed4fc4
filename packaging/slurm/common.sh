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
#   GPUREAP_LIMIT        seconds after which a gpureap that hangs is killed [60]
#   GPUREAP_MATCH        attached or any: which handles count on a job's GPUs [attached]
#   GPUREAP_WHOLE_NODE   yes: nodes are given to one job at a time, all GPUs are freed after each. no: they are not.
#                        ask: asks slurmctld for each job (OverSubscribe=NO) [ask]
#   GPUREAP_SHARED_GPUS  yes: several jobs use one GPU at a time (MPS, shards); only the job's own processes count [no]
#   GPUREAP_STATE        where the health check keeps what it saw last time [/var/lib/gpureap/slurm]
#   SLURM_CONF           as Slurm's commands read it

: "${role:=slurm}"
PATH=${PATH:+$PATH:}/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
export PATH

GPUREAP=gpureap
GPUREAP_GRACE=5s
GPUREAP_TIMEOUT=30s
GPUREAP_LIMIT=60
# shellcheck disable=SC2034 # used by the scripts
GPUREAP_MATCH=attached
GPUREAP_WHOLE_NODE=ask
# shellcheck disable=SC2034 # used by the scripts
GPUREAP_SHARED_GPUS=no
GPUREAP_STATE=/var/lib/gpureap/slurm
settings=${GPUREAP_SLURM_ENV:-/etc/gpureap/slurm.env}
if [ -r "$settings" ]; then
    # shellcheck source=/dev/null
    . "$settings"
fi
if [ -n "${SLURM_CONF:-}" ]; then
    export SLURM_CONF
fi

# Words for the system's log; on stderr where there is no logger.
say() {
    logger -t "gpureap-$role" -- "$*" 2>/dev/null || printf 'gpureap-%s: %s\n' "$role" "$*" >&2
}

# Ends the script well where there is nothing to work with.
require_gpureap() {
    if ! command -v "$GPUREAP" >/dev/null 2>&1; then
        say "$GPUREAP is not installed; nothing is checked"
        exit 0
    fi
}

# gpureap with a limit on its time, for it must not keep slurmd waiting: 124 and 137 where that was reached.
bounded() {
    timeout -k 5 "$GPUREAP_LIMIT" "$GPUREAP" -q "$@"
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

# What slurmctld says of this node: its state and the reason for it.
node_state() {
    node=$(slurm scontrol -o show node "${SLURMD_NODENAME:-}") || return 1
    state=$(printf '%s\n' "$node" | sed -n 's/.* State=\([^ ]*\).*/\1/p')
    reason=$(printf '%s\n' "$node" | sed -n 's/.* Reason=\(.*\)/\1/p')
}

pid_in() {
    printf '%s\n' "$1" | sed -n 's/.*(pid \([0-9]*\),.*/\1/p'
}

# Takes the node from the scheduler, with the reason, and remembers that it was gpureap. Whoever drained it before for another reason
# wants it drained when the GPU is free again.
drain() {
    if ! node_state; then
        say "slurmctld does not answer, so ${SLURMD_NODENAME:-this node} is not drained: $1"
        return
    fi
    case $state in
        *DRAIN*)
            # Of a process that was killed and whose memory was taken nobody can read any more which job's it is: the first
            # reason says more.
            case $reason in
                "gpureap: "*"(pid $(pid_in "$1"),"*) return ;;
                "gpureap: "*) ;;
                *)
                    say "is drained already ($reason): $1"
                    return
                    ;;
            esac
            ;;
    esac
    if slurm scontrol update "NodeName=$SLURMD_NODENAME" State=DRAIN "Reason=gpureap: $1"; then
        say "drained $SLURMD_NODENAME: $1"
        make_state && printf '%s\n' "$1" >"$GPUREAP_STATE/drained"
    else
        say "scontrol could not drain $SLURMD_NODENAME: $1"
    fi
}

make_state() (
    umask 077
    mkdir -p "$GPUREAP_STATE"
)

# Drains where a check has found something. $1: its exit code, $2: what it said.
drain_if_held() {
    case $1 in
        0) ;;
        3 | 4) drain "$2" ;;
        *) say "gpureap check ended with $1; the node is left as it is" ;;
    esac
}
