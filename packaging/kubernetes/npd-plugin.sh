#!/bin/sh
# A custom plugin of node-problem-detector: 0 fine, 1 a problem, 2 not known, and one line on stdout.
# It reads what the container `check` of gpureap's DaemonSet wrote, and needs neither rights nor gpureap. See docs/kubernetes.md.
file=${GPUREAP_CHECK_FILE:-/run/gpureap-check/result}
# Seconds after which the result is too old to be believed.
age=${GPUREAP_CHECK_AGE:-180}

if [ ! -r "$file" ]; then
    echo "gpureap has written nothing: does its pod run here?"
    exit 2
fi
now=$(date +%s)
written=$(stat -c %Y "$file")
if [ $((now - written)) -gt "$age" ]; then
    echo "gpureap has written nothing for $((now - written)) s"
    exit 2
fi
code=
line=
{
    read -r code
    read -r line
} <"$file"
case $code in
    0) status=0 ;;
    3 | 4 | 6) status=1 ;;
    7)
        status=2
        line=${line:-gpureap may not see who holds the GPUs}
        ;;
    8)
        status=2
        line="no gpureap daemon runs, or this node has no GPU"
        ;;
    124 | 137)
        status=2
        line="gpureap check took too long"
        ;;
    *)
        status=2
        line="gpureap check ended with ${code:-nothing}"
        ;;
esac
printf '%s\n' "$line"
exit "$status"
