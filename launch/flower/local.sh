#!/usr/bin/env bash
# A SuperLink and N SuperNodes on this machine, with certificates and registered keys, to try out.
#
#   launch/flower/local.sh start [-n 2] [FLOWER-SUPERNODE'S NODE CONFIG FOR ALL]
#   launch/flower/local.sh run [--run-config 'changes="rounds=5" clients=2']
#   launch/flower/local.sh stop
#
# Everything lies in $FEDERATION (runs/flower): certificates, logs, the clients' own folders, the
# server's workdir. SuperNode K listens on $PORT + 1 + K, the SuperLink on $PORT (18600).
set -euo pipefail

usage() {
  sed -n '2,/^set/{/^# \{0,1\}/s///p}' "$0" >&2
  exit 2
}

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
action=${1:-}
[[ $action =~ ^(start|run|stop)$ ]] || usage
shift
mkdir -p "${FEDERATION:=runs/flower}"
place=$(cd "$FEDERATION" && pwd)
port=${PORT:-18600}
export FLWR_HOME=$place/home FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1

start() {
  local number=2
  if [[ ${1:-} == -n ]]; then number=${2:-} && shift $(($# > 1 ? 2 : 1)); fi
  [[ $number =~ ^[1-9][0-9]*$ ]] || usage
  [[ ! -e $place/pids ]] || { echo "local.sh: $place is started: stop it first" >&2 && exit 2; }
  local keys=$place/certificates
  if [[ ! -e $keys/node-$((number - 1)) ]]; then
    rm -rf "$keys"
    "$here/certificates.sh" "$keys" 127.0.0.1 localhost --nodes "$number"
  fi
  mkdir -p "$FLWR_HOME" "$place/logs"
  rm -f "$place"/superlink.sqlite* # the keys are registered again below
  printf '[superlink]\ndefault = "local"\n\n[superlink.local]\naddress = "127.0.0.1:%s"\n' "$port" \
    >"$FLWR_HOME/config.toml"
  printf 'root-certificates = "%s"\n' "$keys/ca.crt" >>"$FLWR_HOME/config.toml"
  flower-superlink --host 127.0.0.1 --port "$port" --ssl-ca-certfile "$keys/ca.crt" \
    --ssl-certfile "$keys/server.pem" --ssl-keyfile "$keys/server.key" --enable-supernode-auth \
    --database "$place/superlink.sqlite" --disable-runtime-dependency-installation \
    >"$place/logs/superlink.log" 2>&1 &
  echo $! >>"$place/pids"
  for ((k = 0; k < number; k++)); do
    until flwr supernode register "$keys/node-$k.pub" local --name "client-$k" \
      >"$place/logs/register-$k.log" 2>&1; do
      kill -0 $! 2>/dev/null || { cat "$place/logs/superlink.log" >&2 && stop && exit 1; }
      sleep 1
    done
  done
  for ((k = 0; k < number; k++)); do
    flower-supernode --superlink "127.0.0.1:$port" --root-certificates "$keys/ca.crt" \
      --auth-supernode-private-key "$keys/node-$k" --host 127.0.0.1 --port $((port + 1 + k)) \
      --node-config "client=$k folder=\"$place/client-$k\" $*" >"$place/logs/client-$k.log" 2>&1 &
    echo $! >>"$place/pids"
  done
  echo "a SuperLink and $number SuperNodes are up; their logs are in $place/logs"
}

stop() {
  [[ -e $place/pids ]] || return 0
  local pid
  while read -r pid; do kill "$pid" 2>/dev/null || true; done <"$place/pids"
  rm "$place/pids"
}

case $action in
  start) start "$@" ;;
  run) flwr run "$here" local --stream --run-config "workdir=\"$place/server\"" "$@" ;;
  stop) stop ;;
esac
