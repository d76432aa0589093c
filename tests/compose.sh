#!/bin/bash
# Builds the images, starts the whole system in containers, and checks what docker-compose.yml promises:
# the study runs on two workers, its picture and page are served, a killed worker and a restarted database
# cost nothing, `down` and `up` keep the runs, no process is root, nothing listens beyond 127.0.0.1.
#
#   bash tests/compose.sh             (or: make test-compose)
#
# Uses the Docker engine that it finds, in a compose project of its own (gradnorm-test), and removes all of
# it at the end. GRADNORM_ENGINE names a script that starts an engine where there is none: it is called with
# install, start, base, postgres, compose2, env and stop, and finds its folder in W.
# COMPOSE="docker-compose" takes another compose, TORCH_INDEX= another source of torch.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf '%6s s  %s\n' "$((SECONDS - BEGAN))" "$*"; }
fail() { say "FAILED: $*" >&2; exit 1; }
BEGAN=$SECONDS
DONE=()
OUT=$(mktemp -d)

finish() {
    status=$?
    trap - EXIT
    if [ ${#DONE[@]} -gt 0 ] && [ $status -ne 0 ]; then
        compose ps -a || true
        for name in study ray-head ray-worker service postgres; do
            echo "== log of $name"; compose logs --no-color --tail 25 "$name" 2>&1 || true
        done
    fi
    for step in ${DONE[@]+"${DONE[@]}"}; do $step >/dev/null 2>&1 || true; done
    rm -rf "$OUT"
    exit $status
}
trap finish EXIT
trap 'exit 130' INT TERM

if ! docker info >/dev/null 2>&1; then
    if [ -z "${GRADNORM_ENGINE:-}" ]; then
        echo "no Docker engine answers: start one, or name a script that does in GRADNORM_ENGINE" >&2
        exit 1
    fi
    export W=${W:-$OUT/engine}
    docker version --format . >/dev/null 2>&1 || command -v dockerd >/dev/null || bash "$GRADNORM_ENGINE" install >/dev/null
    DONE=("bash $GRADNORM_ENGINE stop")
    bash "$GRADNORM_ENGINE" start >/dev/null
    [ -d "$W/cli/cli-plugins" ] || bash "$GRADNORM_ENGINE" compose2 >/dev/null
    eval "$(bash "$GRADNORM_ENGINE" env)"
    docker image inspect python:3.11-slim >/dev/null 2>&1 || bash "$GRADNORM_ENGINE" base >/dev/null
    docker image inspect postgres:16 >/dev/null 2>&1 || bash "$GRADNORM_ENGINE" postgres >/dev/null
    # The official image runs under `user: postgres`; a stand-in for it may begin as root, use su, and keep
    # the folder of its socket to itself.
    export POSTGRES_IMAGE=gradnorm-test-postgres
    docker build -q -t $POSTGRES_IMAGE - >/dev/null <<'X'
FROM postgres:16
RUN chown -R postgres: /var/lib/postgresql && mkdir -p /var/run/postgresql && chmod 3777 /var/run/postgresql \
    && printf '#!/bin/sh\nexec "$3" -c "$5"\n' > /usr/local/bin/su && chmod +x /usr/local/bin/su
X
    export TORCH_INDEX=${TORCH_INDEX-}  # no registry is in reach: whatever pip finds there
fi

if [ -z "${COMPOSE:-}" ]; then
    if docker compose version >/dev/null 2>&1; then COMPOSE="docker compose"; else COMPOSE=docker-compose; fi
fi
compose() { $COMPOSE -p gradnorm-test "$@"; }
PORT=${GRADNORM_PORT:-8000}
URL=http://127.0.0.1:$PORT
export GRADNORM_TAG=test GRADNORM_PORT=$PORT
get() { curl -sf --noproxy '*' --max-time 30 "$URL$1"; }
value() { python3 -c "import json, sys; run = json.load(sys.stdin); print($1)"; }
clean() { compose down -v --remove-orphans; }

say "engine $(docker version -f '{{.Server.Version}}'), $($COMPOSE version --short)"
for files in "-f docker-compose.yml" "-f docker-compose.yml -f docker-compose.gpu.yml"; do
    said=$(compose $files config -q 2>&1) || fail "config $files: $said"
    [ -z "$said" ] || fail "config $files: $said"
done
say "config is clean, with GPUs and without"

compose build >$OUT/build.log 2>&1 || { tail -30 $OUT/build.log; fail "build"; }
base=$(docker image inspect -f '{{.Size}}' "${PYTHON_IMAGE:-python:3.11-slim}")
for name in study service; do
    size=$(docker image inspect -f '{{.Size}}' gradnorm-$name:test)
    say "image $name: $((size / 1000000)) MB, of which the base image is $((base / 1000000)) MB"
    [ $name = study ] || [ $((size - base)) -lt 325000000 ] || fail "image $name is over 450 MB on a base of 125"
done
docker run --rm gradnorm-service:test python -c "
from importlib.util import find_spec
assert not [name for name in ('ray', 'torch') if find_spec(name)], 'ray or torch is in the service image'"
before=$SECONDS
printf '\n' >> study/__init__.py
compose build >/dev/null 2>&1 || fail "second build"
sed -i '$ d' study/__init__.py
say "a change of code rebuilds both in $((SECONDS - before)) s"
[ $((SECONDS - before)) -lt 60 ] || fail "a change of code takes long to build"

DONE=(clean "${DONE[@]}")
clean >/dev/null 2>&1
up=$SECONDS
compose up -d --scale ray-worker=2 >"$OUT/up.log" 2>&1 || { tail -5 "$OUT/up.log"; fail "up"; }
! grep -iE "warn|error" "$OUT/up.log" || fail "up warned"
for _ in $(seq 300); do get /runs/latest/gradnorm.png >$OUT/picture.png 2>/dev/null && break; sleep 2; done
[ "$(head -c 4 $OUT/picture.png | tail -c 3)" = PNG ] || fail "no picture came"
say "first picture $((SECONDS - up)) s after up"

finished() {  # id seconds: wait for the end of a run
    for _ in $(seq "$2"); do
        status=$(get "/runs/$1" | value 'run["status"]') || status=unknown
        case $status in finished) return 0 ;; failed | interrupted | lost) break ;; esac
        sleep 1
    done
    fail "run $1 is $status"
}
figure=$(get /runs/latest | value 'run["id"]')
finished "$figure" 1500
get "/runs/$figure" | value '"; ".join(" ".join(map(str, (t["id"], t["status"], t["step"]))) for t in run["trials"])' | while read -r line; do say "$line"; done
[ "$(get "/runs/$figure" | value 'sum(t["status"] == "finished" and t["step"] == 1200 for t in run["trials"])')" = 4 ] || fail "not 4 trials finished"
say "run $figure finished $((SECONDS - up)) s after up"
# Into a file first: whoever stops reading early ends curl with an error.
shows() { get "$1" >"$OUT/answer" && grep -qa "$2" "$OUT/answer"; }
shows "/runs/$figure/gradnorm.png" PNG || fail "no PNG"
shows "/ui/runs/$figure" "$figure" || fail "the page doesn't show the run"
shows / "$figure" || fail "the first page doesn't show the run"
say "picture and pages are served"
ended=$(docker wait "$(compose ps -a -q study 2>/dev/null || compose ps -q study)")
[ "$ended" = 0 ] || fail "study ended with $ended"

for id in $(compose ps -q); do
    name=$(docker inspect -f '{{.Name}}' "$id")
    user=$(docker inspect -f '{{.Config.User}}' "$id")
    case $user in "" | root | 0*) fail "$name is started as '$user'" ;; esac
    [ "$(docker inspect -f '{{.State.Running}}' "$id")" = true ] || continue
    users=$(docker top "$id" -eo pid,uid | awk 'NR > 1 {print $2}' | sort -u | tr '\n' ' ')
    case " $users" in *" 0 "*) fail "$name has a process of root" ;; esac
    say "$name: user $user, processes of uid $users, $(docker stats --no-stream --format '{{.MemUsage}}' "$id")"
done
ports=$(docker ps --filter label=com.docker.compose.project=gradnorm-test --format '{{.Ports}}' | tr ',' '\n' | grep -e '->' | sort -u)
echo "$ports" | grep -v '^ *127\.0\.0\.1:' && fail "a port is open beyond 127.0.0.1"
say "open ports: $(echo $ports)"
compose exec -T ray-worker python -c "
import socket
try:
    socket.getaddrinfo('postgres', 5432); raise SystemExit('a worker sees the database')
except OSError:
    pass" || fail "networks"
compose exec -T -e RAY_AUTH_TOKEN_PATH=/dev/null -e RAY_AUTH_TOKEN=wrong ray-worker \
    python -c "import ray; ray.init('ray-head:6379')" >$OUT/refused.log 2>&1 && fail "a wrong token is taken"
grep -qi "auth" $OUT/refused.log || { tail -3 $OUT/refused.log; fail "a wrong token is refused for another reason"; }
say "workers don't see the database; a wrong token is refused"

equal() {  # id: each trial's trace equals the first steps of the one that nothing happened to
    compose exec -T service python - "$figure" "$1" <<'X' || fail "traces of $1 differ"
import sys
from study.storage import Storage
from study.traces import read_trace
storage, (known, run) = Storage("/runs"), sys.argv[1:]
for number in range(4):
    found = read_trace(storage, run, f"{run}_{number:05d}").table
    whole = read_trace(storage, known, f"{known}_{number:05d}").table.slice(0, found.num_rows)
    assert found.num_rows == 400 and found.equals(whole.select(found.column_names)), number
X
}
running() {  # id step: wait until two trials of it are past that step
    for _ in $(seq 600); do
        many=$(get "/runs/$1" | value "sum(t['step'] > $2 for t in run['trials'])") || many=0
        [ "$many" -ge 2 ] && return 0
        sleep 1
    done
    fail "run $1 doesn't get on"
}
start() {  # id: the same trials, shorter, from a driver in a container of its own
    # --no-deps: or compose 2 brings the workers back to one.
    compose run -d --rm --no-deps study python study/run.py figure --run-id "$1" --set trial.steps=400 \
        --set flush_seconds=1 --set checkpoint_seconds=4 >/dev/null 2>&1 || fail "run $1 doesn't start"
}

start killed
running killed 60
victim=$(docker ps -q --filter label=com.docker.compose.project=gradnorm-test --filter label=com.docker.compose.service=ray-worker | head -1)
docker kill "$victim" >/dev/null
say "killed a ray-worker"
finished killed 900
equal killed
attempts=$(get /runs/killed | value 'sorted(t["attempts"] for t in run["trials"])')
[ "$attempts" != "[1, 1, 1, 1]" ] || fail "no trial was on the killed worker"
say "run killed finished, attempts $attempts, traces equal bit for bit"
docker start "$victim" >/dev/null

start restarted
running restarted 60
compose restart -t 1 postgres >/dev/null 2>&1
say "restarted postgres"
finished restarted 900
equal restarted
[ "$(get /runs/restarted | value '[(t["status"], t["step"], t["attempts"]) for t in run["trials"]] == [("finished", 400, 1)] * 4')" = True ] \
    || fail "the catalogue differs: $(get /runs/restarted)"
say "run restarted finished, traces equal bit for bit, the catalogue caught up"

compose down >/dev/null 2>&1
compose up -d --scale ray-worker=1 >/dev/null 2>&1
for _ in $(seq 120); do get /readyz >/dev/null 2>&1 && break; sleep 1; done
for run in "$figure" killed restarted; do
    [ "$(get "/runs/$run" | value 'run["status"]')" = finished ] || fail "run $run is gone"
done
shows /runs/killed/gradnorm.png PNG || fail "no PNG after down and up"
say "down and up kept $(get /runs | value '", ".join(r["id"] for r in run["runs"])')"
say "all checks passed"
