#!/usr/bin/env bash
# One training by N processes on this machine; where there are GPUs, process i has GPU i.
#
#   launch/local.sh -n 2 [--dry-run] --config quickstart --workdir runs/quickstart
#
# -m MODULE runs a module of your own. PYTHON names the interpreter. All end when one fails or is
# killed, and a message names it; the same command continues from the last checkpoint.
set -euo pipefail

number=0 module=fedjax_bn.main dry_run=false
while (($#)); do
  case $1 in
    -n) number=${2:-} && shift $(($# > 1 ? 2 : 1)) ;;
    -m) module=${2:-} && shift $(($# > 1 ? 2 : 1)) ;;
    --dry-run) dry_run=true && shift ;;
    *) break ;;
  esac
done
if [[ ! $number =~ ^[1-9][0-9]*$ || -z $module ]]; then
  sed -n '2,/^set/{/^# \{0,1\}/s///p}' "$0" >&2
  exit 2
fi
if [[ " $* " == *" --dry-run "* ]]; then
  echo "local.sh: --dry-run belongs before the program's own arguments" >&2
  exit 2
fi

python=${PYTHON:-python}
port=$("$python" -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])')
pids=()
for ((i = 0; i < number; i++)); do
  command=(env "JAX_COORDINATOR_ADDRESS=localhost:$port" "JAX_NUM_PROCESSES=$number"
    "JAX_PROCESS_ID=$i" "JAX_LOCAL_DEVICE_IDS=$i" "$python" -m "$module" --distributed "$@")
  if $dry_run; then
    printf '%q ' "${command[@]}" && echo
  else
    "${command[@]}" &
    pids+=($!)
  fi
done

# The program takes TERM as it takes Ctrl-C, which does not reach background processes.
stop() { kill -TERM "${pids[@]}" 2>/dev/null || true; }
trap stop INT TERM

# Names the processes that ended with an error; one that was killed has printed nothing.
name_ended() {
  local i ended
  for ((i = 0; i < number; i++)); do
    if kill -0 "${pids[i]}" 2>/dev/null; then continue; fi
    ended=0 && wait "${pids[i]}" || ended=$?
    if ((ended > 128)); then
      echo "local.sh: process $i of $number was ended by SIG$(kill -l "$ended"), so that the others" \
        "are stopped: give the same command to continue from the last checkpoint" >&2
    elif ((ended)); then
      echo "local.sh: process $i of $number ended with status $ended, so that the others are stopped" >&2
    fi
  done
}

status=0
for _ in ${pids[@]+"${pids[@]}"}; do
  wait -n || {
    status=$? && name_ended && stop
    break
  }
done
until wait; do :; done # a trap cuts a wait short
exit "$status"
