"""Write an sbatch script: it trains, saves before the time limit, and goes back into the queue."""

from __future__ import annotations

import shlex

from .excluded_nodes import EXCLUDED_NODES
from .job import Job
from .network import optional, variables

_SCRIPT = """\
#!/bin/bash
# Trains {recipe} on {nodes} nodes with {ranks} ranks each. Submit it with: sbatch {file}
# Read it and adapt it; trilith does not need this file to stay as it is.
#SBATCH --job-name={name}
#SBATCH --nodes={range}
{tasks}
{resources}
#SBATCH --time={time}
#SBATCH --signal=B:USR1@{seconds}         # this script hears of the limit {warning} minutes before it
#SBATCH --requeue                      # a lost node puts the job back in the queue
#SBATCH --dependency=singleton         # one job of this name at a time: several in a row make a chain
#SBATCH --open-mode=append
#SBATCH --output={name}-%j.log
{directives}
set -u
out={out}
mkdir -p "$out"

{environment}

# The job does not use nodes whose names are in the run's file {excluded}, one name on each line. It asks
# for {spares} to replace them. To exclude a bad node, write its name into this file.
touch "$out/{excluded}"
nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | grep --invert-match --line-regexp --fixed-strings \
    --file="$out/{excluded}" | head -n {nodes})
count=$(wc -w <<< "$nodes")
if [ "$count" -lt {least} ]; then
    echo "error: $count nodes of $SLURM_JOB_NODELIST are not excluded, {least} are needed" >&2
    exit 2
fi

# The first node's address, by number: names of nodes need not be known to each other.
head=$(head -n 1 <<< "$nodes")
address=$(srun --nodes=1 --ntasks=1 --nodelist="$head" hostname --all-ip-addresses | cut -d ' ' -f 1)
restart=${{SLURM_RESTART_COUNT:-0}}
port=$((20000 + (SLURM_JOB_ID * 7 + restart) % 20000))

# At the limit's signal the run is asked, by a file in its folder, to save after the step at hand and to end.
trap 'touch "$out/stop"' USR1

# One launcher a node. The first is told that all meet there: its name may not resolve to its address.
export address port restart count
launcher='exec torchrun --nnodes="$count" --nproc-per-node={ranks} \
    --rdzv-backend=c10d --rdzv-endpoint="$address:$port" --rdzv-id="$SLURM_JOB_ID-$restart" \
    --rdzv-conf=is_host=$((SLURM_NODEID == 0)) \
    --local-addr="$(hostname --all-ip-addresses | cut -d " " -f 1)" --no-python "$@"'

touch "$out/job-started"
srun --kill-on-bad-exit=1 --nodes="$count" --ntasks="$count" --nodelist="$(paste -sd, <<< "$nodes")" \
    bash -c "$launcher" launcher {command} &
while kill -0 $! 2> /dev/null; do wait $!; done  # a signal ends a wait, not the run

# torchrun ends with 1 whatever its ranks ended with: the run's folder knows.
trilith status "$out" --since "$out/job-started" --exit-code
code=$?
case $code in
0) exit 0 ;;                                    # finished
75) scontrol requeue "$SLURM_JOB_ID" ;;         # saved: go on when there is room
2 | 4) exit $code ;;                            # bad input, a damaged checkpoint: a person must look
*)
    if [ "$restart" -lt {restarts} ]; then
        scontrol requeue "$SLURM_JOB_ID"        # from the last checkpoint
    else
        exit $code
    fi
    ;;
esac
"""


def slurm_script(job: Job, file: str) -> str:
    """Return the text of an sbatch script."""
    resources = [f"#SBATCH --gpus-per-node={job.ranks}"] if job.gpu else []
    resources += [f"#SBATCH --cpus-per-task={job.ranks}             # at least one core a rank"]
    resources += ["#SBATCH --exclusive"] if job.gpu else []
    # Of a range of nodes Slurm takes the fewest if it is told the tasks of a node, else all that are free.
    tasks = "#SBATCH --ntasks-per-node=1            # one launcher a node; it starts the ranks"
    if job.least < job.nodes:
        tasks = "# No --ntasks-per-node: with it, Slurm would take the fewest nodes of the range."
    directives = [f"#SBATCH --partition={job.partition}"] if job.partition else []
    directives += [f"#SBATCH --account={job.account}"] if job.account else []
    directives += [f"#SBATCH --exclude={','.join(job.exclude)}"] if job.exclude else []
    lines = [f"export {name}={value}  # {why}" for name, value, why in variables(gpu=job.gpu)]
    lines += [f"# export {name}={value}  # {why}" for name, value, why in optional(gpu=job.gpu)]
    most = job.nodes + job.spares
    text = _SCRIPT.format(
        excluded=EXCLUDED_NODES,
        recipe=job.recipe,
        nodes=job.nodes,
        least=job.least,
        range=f"{job.least}-{most}" if job.least < job.nodes else most,
        spares=f"{job.spares} more" if job.spares else "no spare nodes",
        ranks=job.ranks,
        file=file,
        name=job.name,
        tasks=tasks,
        resources="\n".join(resources),
        time=job.time,
        seconds=60 * job.warning,
        warning=job.warning,
        directives="\n".join(directives),
        out=shlex.quote(job.out),
        environment="\n".join(lines),
        command=job.command,
        restarts=job.restarts,
    )
    return text.replace("\n\nset -u", "\nset -u") if not directives else text
