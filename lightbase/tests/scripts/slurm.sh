#!/usr/bin/env bash
# Train on a SLURM cluster, in the environment that is active when you submit:
#
#     sbatch scripts/slurm.sh --config configs/cifar10_cnn.yaml
#
# All arguments go to train.py, which takes the number of machines and processes from SLURM. The repository must lie on
# a file system that all machines share. Change the #SBATCH lines to your cluster, or give them to sbatch.
#
# Two minutes before the time limit, SLURM asks the training to stop: it keeps its state and this script puts the job
# back into the queue, where it goes on in the same run folder. The same happens when the job is preempted, or when a
# machine fails (from the last epoch's checkpoint).

#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=4
#SBATCH --time=04:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=logs/slurm-%j.out

set -u
trap '' TERM # for the training; this script must outlive it

# the job keeps its number in the queue, so this name is its own
name=slurm_$SLURM_JOB_ID
resume=()
if compgen -G "logs/$name/version_*/checkpoints/last.ckpt" > /dev/null; then
    resume=(--ckpt_path last)
fi

# srun of SLURM 22.05 and newer does not take --cpus-per-task from the job
srun --kill-on-bad-exit=1 ${SLURM_CPUS_PER_TASK:+--cpus-per-task=$SLURM_CPUS_PER_TASK} \
    python scripts/train.py "$@" --name "$name" "${resume[@]}"
status=$?

if [ "$status" = 143 ]; then # stopped by SIGTERM
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
