# --- How it runs: the same in every file that trtx writes -----------------------------------------------------------
# The batch shell starts each process as a step of its own, and watches the steps. In a step this file is run again, as
# "job.sh step NAME" on the node of the process: there addresses, devices and node-local directories are known.

ASKED=''           # the signal that asked the job to end
declare -A PID=()  # step that runs -> its srun
ADDRESS='' DEVICE='' # of this node

say() { printf '%(%H:%M:%S)T %s\n' -1 "$*"; }

complain() { printf '%(%H:%M:%S)T FAILED: %s\n' -1 "$*" >&2; }

# srun with the options of every step. Steps share the nodes (--overlap) and all of their cores (a site may bind a task
# to one), and a step of several tasks ends with the first that fails, or a minute after the first that ends with 0.
srun_on() { # NODES-WITH-COMMAS TASKS-A-NODE: sets SRUN
  local commas=${1//[!,]/}
  local nodes=$((${#commas} + 1))
  SRUN=(srun --nodelist="$1" --nodes="$nodes" --ntasks="$((nodes * $2))" --ntasks-per-node="$2"
    --overlap --cpu-bind=none --kill-on-bad-exit=1 --wait=60 --input=none --export=ALL)
}

start() { # NAME NODES-WITH-COMMAS TASKS-A-NODE SRUN-OPTION…: a step in the background, with a log of its own
  local name=$1
  srun_on "$2" "$3"
  shift 3
  "${SRUN[@]}" --job-name="$name" "$@" bash "$TRTX_RUN/job.sh" step "$name" >"$TRTX_RUN/logs/$name.log" 2>&1 &
  PID[$name]=$!
}

on_all_nodes() { # NAME SRUN-OPTION…: a step on every node, until it ends
  local name=$1
  shift
  srun_on "$(IFS=,; echo "${NODES[*]}")" 1
  "${SRUN[@]}" --job-name="$name" --mpi=none "$@" bash "$TRTX_RUN/job.sh" "$name" 2>"$TRTX_RUN/logs/$name.log" && return
  complain "a node can't take part: $(last_words "$name" 3)"
  return 1
}

# Returns as soon as one of the steps has ended, its name in ENDED and its exit code in CODE; with ENDED empty where the
# job was asked to end, or SECONDS reached the number that is given.
await_an_end() { # [SECONDS]
  local name
  ENDED='' CODE=0
  while [[ -z $ASKED ]] && ((SECONDS < ${1:-2147483647})); do
    for name in "${!PID[@]}"; do
      kill -0 "${PID[$name]}" 2>/dev/null && continue
      wait "${PID[$name]}"
      CODE=$? ENDED=$name
      unset "PID[$name]"
      return
    done
    sleep 0.5 &
    wait $!
  done
}

# Nobody asks a process to end while the job goes on, so any end is a death: one that lost its lease in etcd ends with 0.
report_death() { # NAME CODE
  complain "$1 ended with code $2, and nobody had asked it to; the end of $TRTX_RUN/logs/$1.log:"
  tail -n 20 "$TRTX_RUN/logs/$1.log" | sed 's/^/    /' >&2
}

# By scancel: srun makes a SIGKILL of a SIGTERM that it is sent itself (seen with 22.05).
signal_steps() { # SIGNAL NAME…
  local signal=$1 id name ids=()
  shift
  while read -r id name; do
    [[ " $* " == *" $name "* ]] && ids+=("$id")
  done < <(squeue --steps --noheader --jobs="$SLURM_JOB_ID" --format='%i %j')
  ((${#ids[@]})) && scancel --signal="$signal" "${ids[@]}" 2>/dev/null # one that has just ended is an error
}

stop() { # SECONDS NAME…: SIGTERM to those that run, all at once, and SIGKILL to what has not ended in time
  local until=$((SECONDS + $1)) name left=()
  shift
  for name in "$@"; do
    [[ -n ${PID[$name]:-} ]] && left+=("$name")
  done
  ((${#left[@]})) && signal_steps TERM "${left[@]}"
  while ((${#left[@]})); do
    for name in "${left[@]}"; do
      kill -0 "${PID[$name]}" 2>/dev/null || unset "PID[$name]"
    done
    left=()
    for name in "$@"; do
      [[ -n ${PID[$name]:-} ]] && left+=("$name")
    done
    if ((${#left[@]} && SECONDS >= until)); then
      say "killed, as they did not end in time: ${left[*]}"
      signal_steps KILL "${left[@]}"
      until=2147483647 # the kernel ends them now, and srun with them
    fi
    sleep 0.2 &
    wait $!
  done
}

stop_all() { # clients first, then who routes, then who computes, and what all of them need last
  local ending=("${!PID[@]}")
  ((${#ending[@]})) && say "stopping ${ending[*]}"
  stop 10 bench ready
  stop "$DRAIN_SECONDS" "${FRONTENDS[@]}"
  stop "$((DRAIN_SECONDS + 30))" "${WORKERS[@]}"
  stop 10 nats etcd
}

await_port() { # NAME ADDRESS PORT: until the step listens there
  local until=$((SECONDS + 60))
  while ! (exec 3<>"/dev/tcp/$2/$3") 2>/dev/null; do
    await_an_end "$((SECONDS + 1))"
    if [[ -n $ENDED ]]; then
      report_death "$ENDED" "$CODE"
      return 1
    elif [[ -n $ASKED ]]; then
      return 1
    elif ((SECONDS >= until)); then
      complain "$1 does not listen on $2:$3 after 60 s; see $TRTX_RUN/logs/$1.log"
      return 1
    fi
  done
}

# Begins with a letter, or NATS might read a number.
secret() { printf 's' && head -c 24 /dev/urandom | od -An -vtx1 | tr -d ' \n'; }

last_words() { grep -v -e '^srun:' -e '^slurmstepd' "$TRTX_RUN/logs/$1.log" | tail -n "${2:-1}"; }

etcd_call() { # PATH, and the body on standard input: no secret is ever on a command line
  curl --silent --show-error --fail --noproxy '*' --max-time 10 --output /dev/null --data-binary @- \
    "http://$HEAD:$REGISTRY_PORT/v3/$1"
}

# etcd's users are there before any process of Dynamo. Root's password is not kept: nobody needs it again.
close_etcd() {
  local root begin end
  root=$(secret)
  begin=$(printf 'v1/' | base64) end=$(printf 'v10' | base64) # all that Dynamo keeps begins with v1/
  printf '{"name":"root","password":"%s"}' "$root" | etcd_call auth/user/add &&
    printf '{"name":"root"}' | etcd_call auth/role/add &&
    printf '{"user":"root","role":"root"}' | etcd_call auth/user/grant &&
    printf '{"name":"dynamo"}' | etcd_call auth/role/add &&
    printf '{"name":"dynamo","perm":{"permType":"READWRITE","key":"%s","range_end":"%s"}}' "$begin" "$end" |
    etcd_call auth/role/grant &&
    printf '{"name":"%s","password":"%s"}' "$ETCD_AUTH_USERNAME" "$ETCD_AUTH_PASSWORD" | etcd_call auth/user/add &&
    printf '{"user":"%s","role":"dynamo"}' "$ETCD_AUTH_USERNAME" | etcd_call auth/user/grant &&
    printf '{}' | etcd_call auth/enable
}

serve() { # 0 once the benchmark is done, or the job was asked to end; else why not
  start etcd "${NODES[0]}" 1 --mpi=none # before there are secrets in the environment
  export ETCD_AUTH_USERNAME ETCD_AUTH_PASSWORD NATS_AUTH_USERNAME NATS_AUTH_PASSWORD
  start nats "${NODES[0]}" 1 --mpi=none
  await_port etcd "$HEAD" "$REGISTRY_PORT" && await_port nats "$HEAD" "$EVENTS_PORT" || return 4
  close_etcd || { complain "etcd's users can't be set; see $TRTX_RUN/logs/etcd.log"; return 4; }
  start_processes
  say "started ${FRONTENDS[*]} ${WORKERS[*]}; waiting until they serve, at most $READY_SECONDS s"
  start ready "${NODES[0]}" 1 --mpi=none "${CONTAINER[@]}"
  await_an_end
  [[ -z $ENDED ]] && return 0
  if [[ $ENDED != ready ]]; then
    report_death "$ENDED" "$CODE"
    return 4
  elif ((CODE)); then
    complain "not ready: $(last_words ready)"
    return 4
  fi
  say "Ready: $URL serves $SERVED: $(last_words ready). Until the job ends: scancel --batch --signal=TERM $SLURM_JOB_ID"
  if ((BENCH)); then
    say "benchmark: $TRTX_RUN/logs/bench.log"
    start bench "${NODES[0]}" 1 --mpi=none "${CONTAINER[@]}"
  fi
  await_an_end
  [[ -z $ENDED ]] && return 0
  if [[ $ENDED == bench ]]; then
    ((CODE)) && complain "the benchmark ended with code $CODE: $(last_words bench)"
    ((CODE)) || say "benchmark done: $(last_words bench)"
    return "$CODE"
  fi
  report_death "$ENDED" "$CODE"
  return 4
}

asked_to_end() { # SIGNAL: the second one does not wait
  if [[ -n $ASKED ]]; then
    kill -KILL "${PID[@]}" 2>/dev/null
  fi
  ASKED=$1
}

job() {
  local code
  mapfile -t NODES < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
  if ((${#NODES[@]} != NODE_COUNT)); then
    complain "the job has ${#NODES[@]} nodes and was planned for $NODE_COUNT; submit it without --nodes, or export again"
    return 2
  fi
  mkdir -p "$TRTX_RUN"/{configs,logs,status} && cp -- "$0" "$TRTX_RUN/job.sh" && write_configs ||
    { complain "the run directory $TRTX_RUN can't be written"; return 2; }
  if ((${#CONTAINER[@]})) && [[ $TRTX_RUN == *[:,]* ]]; then
    complain "$TRTX_RUN can't be mounted in a container, as it has a colon or a comma in it; submit from elsewhere"
    return 2
  fi
  trap 'asked_to_end TERM' TERM
  trap 'asked_to_end INT' INT
  say "job $SLURM_JOB_ID on ${NODES[*]}; logs in $TRTX_RUN/logs"
  on_all_nodes look >"$TRTX_RUN/nodes" || return 4
  grep '^warning: ' "$TRTX_RUN/logs/look.log"
  HEAD=$(address_of "${NODES[0]}")
  URL="http://$HEAD:$HTTP_PORT"
  export HEAD URL
  ((${#CONTAINER[@]})) && CONTAINER[1]+=",$TRTX_RUN:$TRTX_RUN"
  on_all_nodes check "${CONTAINER[@]}" || return 4
  ETCD_AUTH_USERNAME=trtx ETCD_AUTH_PASSWORD=$(secret)
  NATS_AUTH_USERNAME=trtx NATS_AUTH_PASSWORD=$(secret)
  serve
  code=$?
  stop_all
  if [[ -n $ASKED ]]; then
    say "ended because SIG$ASKED asked for it"
    [[ $ASKED == TERM ]] && ((BENCH)) && return 143
  fi
  return "$code"
}

address_of() { awk -v node="$1" '$1 == node { print $2 }' "$TRTX_RUN/nodes"; }

# --- On a node ---

look() { # NODE ADDRESS DEVICE: how other nodes reach this one
  local address device
  PATH="$PATH:/usr/sbin:/sbin" # where ip is, for people who are not root
  if [[ -n $INTERFACE ]]; then
    address=$(ip -4 -o addr show dev "$INTERFACE" scope global | awk '{ sub("/.*", "", $4); print $4; exit }')
    if [[ -z $address ]]; then
      complain "$SLURMD_NODENAME has no IPv4 address on $INTERFACE; name another with --interface"
      return 1
    fi
  else # the one that the first node is reached from
    address=$(ip -4 -o route get "$SLURM_LAUNCH_NODE_IPADDR" | sed -n 's/.* src \([0-9.]*\).*/\1/p')
  fi
  device=$(ip -4 -o addr show | awk -v address="$address" '{ split($4, at, "/") } at[1] == address { print $2; exit }')
  if [[ -z $address || -z $device || $device == lo || $address == 127.* ]] && ((NODE_COUNT > 1)); then
    complain "$SLURMD_NODENAME has the address '$address' on '$device', which no other node reaches; name the interface" \
      "with --interface"
    return 1
  fi
  printf '%s %s %s\n' "$SLURMD_NODENAME" "$address" "$device"
}

check() { # what every node needs, in the container where there is one
  local version file
  if [[ ! -r $MODEL/config.json ]]; then
    complain "$SLURMD_NODENAME can't read $MODEL/config.json; put the model where all nodes see it"
    return 1
  fi
  for file in "${BENCH_FILES[@]}"; do
    ((SLURM_NODEID)) && break # the benchmark runs on the first
    if [[ ! -r $file ]]; then
      complain "$SLURMD_NODENAME can't read $file, which --bench names; put it where the first node sees it"
      return 1
    fi
  done
  version=$("$PYTHON" -m trtx --version) || { complain "$SLURMD_NODENAME can't run $PYTHON -m trtx"; return 1; }
  if [[ $version != "trtx $TRTX_VERSION" ]]; then
    complain "$SLURMD_NODENAME has $version and this file was written by trtx $TRTX_VERSION; export it again there"
    return 1
  fi
}

choose_gpus() { # INDEX…: of those that Slurm gave the job on this node
  local given=() chosen=() index
  IFS=, read -ra given <<<"${CUDA_VISIBLE_DEVICES:-}"
  for index in "$@"; do
    if ((${#given[@]} == 0)); then
      chosen+=("$index")
    elif ((index < ${#given[@]})); then
      chosen+=("${given[index]}")
    else
      complain "$SLURMD_NODENAME gives the job ${#given[@]} GPUs, and GPU $index was planned; ask for more, or export again"
      return 1
    fi
  done
  CUDA_VISIBLE_DEVICES=$(IFS=,; echo "${chosen[*]}")
  export CUDA_VISIBLE_DEVICES
}

# What every job has beside the processes of its topology.
describe() { # NAME: sets COMMAND, and what is in its environment
  case $1 in
  etcd) # takes all ETCD_… for settings of its own, and logs those that are none
    COMMAND=("$REGISTRY" --name head --data-dir "$LOCAL/etcd" --log-level warn --auto-compaction-retention 1
      --listen-client-urls "http://$HEAD:$REGISTRY_PORT" --advertise-client-urls "http://$HEAD:$REGISTRY_PORT"
      --listen-peer-urls "http://127.0.0.1:$REGISTRY_PEER_PORT"
      --initial-advertise-peer-urls "http://127.0.0.1:$REGISTRY_PEER_PORT"
      --initial-cluster "head=http://127.0.0.1:$REGISTRY_PEER_PORT")
    ;;
  nats) # the words in its file that begin with $ are looked up in its environment
    printf 'listen: "%s:%s"\nmax_payload: %s\nauthorization { user: $NATS_AUTH_USERNAME, password: $NATS_AUTH_PASSWORD }\n' \
      "$HEAD" "$EVENTS_PORT" "$EVENTS_MAX_PAYLOAD" >"$LOCAL/nats.conf"
    COMMAND=("$EVENTS" --config "$LOCAL/nats.conf")
    ;;
  ready)
    forget_secrets
    COMMAND=("$PYTHON" -m trtx.export.wait "$URL" "$SERVED" --workers "$EXPECTED" --timeout-s "$READY_SECONDS"
      --prove-handoffs "$ENGINE" --logs "$TRTX_RUN/logs")
    ;;
  bench)
    forget_secrets
    COMMAND=("$PYTHON" -m trtx bench --url "$URL" --model "$SERVED" --tokenizer "$MODEL" --output "$TRTX_RUN/bench"
      "${GPU_COUNT[@]}" "${BENCH_WORDS[@]}")
    ;;
  *) process "$1" ;;
  esac
}

# Of what asks the frontend alone: nothing secret, and no proxy between it and an address of the job.
forget_secrets() {
  export no_proxy='*' NO_PROXY='*'
  unset ETCD_AUTH_USERNAME ETCD_AUTH_PASSWORD NATS_AUTH_USERNAME NATS_AUTH_PASSWORD
}

count_threads() { # WORKERS: of each of so many on this node; half of the cores are for engines
  THREADS=$(($(nproc) / 2 / $1))
  ((THREADS)) || THREADS=1
}

step() { # NAME: one process, in a directory of its own on this node's disk, which goes with it
  local child code
  read -r ADDRESS DEVICE < <(awk -v node="$SLURMD_NODENAME" '$1 == node { print $2, $3 }' "$TRTX_RUN/nodes")
  LOCAL=$(mktemp -d "$LOCAL_PARENT/trtx-$SLURM_JOB_ID-$1.XXXXXX") || return 4
  trap 'rm -rf -- "$LOCAL"' EXIT
  trap : TERM INT # Slurm signals all processes of a step; this one stays until its child has ended, to tidy up
  describe "$1" || return
  "${COMMAND[@]}" &
  child=$!
  wait "$child"
  code=$?
  while ((code > 128)) && kill -0 "$child" 2>/dev/null; do
    wait "$child"
    code=$?
  done
  return "$code"
}

case ${1:-job} in
job) job ;;
look) look ;;
check) check ;;
step) step "$2" ;;
esac
exit
