"""Writes a job as a SLURM batch script."""

from __future__ import annotations

from .job import FINAL, LAST_SECONDS, REQUEUED, RESTARTS, SAVE_SECONDS, Job, commented


def script(job: Job) -> str:
    """Returns the script for `sbatch`, with one process per GPU."""
    interrupted, lost = REQUEUED
    settings = commented(job.settings(), "", 'export {name}="{value}"')
    return "\n".join(
        [
            "#!/usr/bin/env bash",
            f"# {job.nodes} nodes with {job.gpus} GPUs each, one process per GPU.",
            f"#SBATCH --job-name={job.name}",
            f"#SBATCH --nodes={job.nodes}",
            f"#SBATCH --ntasks-per-node={job.gpus}",
            f"#SBATCH --gpus-per-node={job.gpus}",
            "#SBATCH --exclusive",
            f"#SBATCH --time={job.hours}:00:00",
            f"# SIGTERM comes {SAVE_SECONDS} seconds before the end: the run saves and exits with "
            f"{interrupted}.",
            f"#SBATCH --signal=SIGTERM@{SAVE_SECONDS}",
            "# After a node failure or a preemption, SLURM itself queues the job again.",
            "#SBATCH --requeue",
            "#SBATCH --output=slurm-%j.log",
            "# A requeued job appends to the log of its first start.",
            "#SBATCH --open-mode=append",
            "",
            "set -euo pipefail",
            *settings,
            "",
            f'mkdir -p "{job.run_dir}" "$JAX_COMPILATION_CACHE_DIR"',
            "code=0",
            "# Ranks that lose another rank exit with their own code. If srun killed them first,",
            "# the exit code of the step would be that of SIGKILL.",
            f"srun --kill-on-bad-exit=0 --wait={LAST_SECONDS} \\",
            f'  --output="{job.run_dir}/slurm-%j-rank-%t.log" \\',
            f"  {job.shell_command} || code=$?",
            f"# {interrupted}: a signal ended the run and its state is saved. {lost}, or 128 + the "
            "number of",
            f"# a signal: a process was lost; the job restarts at most {RESTARTS} times.",
            f"# {FINAL}: a mistake in the config or the command; another attempt would fail, too.",
            f'is_lost() {{ [ "$code" -eq {lost} ] || [ "$code" -gt 128 ]; }}',
            f'may_retry() {{ [ "${{SLURM_RESTART_COUNT:-0}}" -lt {RESTARTS} ]; }}',
            f'if [ "$code" -eq {interrupted} ] || {{ is_lost && may_retry; }}; then',
            '  scontrol requeue "$SLURM_JOB_ID"',
            "fi",
            'exit "$code"',
            "",
        ]
    )
