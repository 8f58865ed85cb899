# shellcheck shell=bash
# What lab.sh and its tool 'node' share. A node's folder is $run/NAME: 'qemu' (the command that is its
# machine), 'pid', 'console.log', and what the guest sees of it as /run/lab.

say() { printf '%s: %s\n' "${program:-lab}" "$*" >&2; }

# start_guest NAME : runs its 'qemu' in the background, with this standard input and these outputs.
start_guest() {
  local folder=$run/$1
  rm -f "$folder/ready" "$folder/exit_status"
  (
    close_inherited_files
    exec env LAB_RUN="$run" bash "$folder/qemu"
  ) <&0 &
  echo $! >"$folder/pid"
}

# Whoever waits for the end of a pipe shall not wait for a guest that was started meanwhile.
close_inherited_files() {
  local file
  for file in "/proc/$BASHPID/fd"/*; do
    file=${file##*/}
    ((file <= 2)) || exec {file}>&-
  done
}

# node_is_up NAME : whether its pid is its QEMU. One that has ended and was not waited for has no command line.
node_is_up() {
  local pid
  local -a words=()
  [[ -s $run/$1/pid ]] || return 1
  pid=$(<"$run/$1/pid")
  { mapfile -d '' -t words <"/proc/$pid/cmdline"; } 2>/dev/null || return 1
  [[ " ${words[*]} " == *" file:$run/$1/console.log "* ]]
}

show_console() {
  [[ ! -e $run/$1/console.log ]] || tail -n 15 "$run/$1/console.log" >&2
}

# The processes of a run, whoever started them: they have its folder in their environment.
processes_of_run() { grep -lzxF -- "LAB_RUN=$1" /proc/[0-9]*/environ 2>/dev/null | cut -d/ -f3; }

# Ends them; those that do not mind SIGTERM after 3 s.
stop_run() {
  local attempt signal=TERM
  local -a pids
  for ((attempt = 0; attempt < 100; attempt++)); do
    mapfile -t pids < <(processes_of_run "$1")
    [[ ${#pids[@]} -gt 0 ]] || return 0
    ((attempt < 30)) || signal=KILL
    if ((attempt == 0 || attempt >= 30)); then kill "-$signal" "${pids[@]}" 2>/dev/null || true; fi
    sleep 0.1
  done
}
