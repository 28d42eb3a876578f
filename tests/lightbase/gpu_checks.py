"""What only a GPU can prove: the scripts in every precision, with every optimiser and strategy,
resumes between GPU and CPU, waits by source line, speed, and the tests marked `gpu`: one holds the
device monitor's load against nvidia-smi's.

bash tests/gpu_check.sh                        # about ten minutes on a machine with a GPU; it needs
no network bash tests/gpu_check.sh --dry                  # the same commands on a CPU; what needs a
GPU is not run bash tests/gpu_check.sh --only waits ddp       # some of them, by the beginning of
their names

It ends with a table in markdown, for docs/performance.md, and status 1 if a check has failed. Its
folder, `--output`, keeps the table and what each command has printed. Packages may be on
PYTHONPATH; PYTHON is another interpreter.
"""

import argparse
import importlib.util
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent  # a small repository, with scripts/ and configs/
REPO = HERE.parents[1]
PYTHON = shlex.quote(sys.executable)
LIMIT_S = 300  # a command
NO_GPU = "needs a GPU"
PRECISIONS = ("32-true", "16-mixed", "bf16-mixed", "16-true", "bf16-true", "64-true")
OPTIMIZERS = (
    "SGD",
    "Adam",
    "AdamW",
    "Adagrad",
    "Adadelta",
    "Adamax",
    "Adafactor",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
)

TINY = "scripts/train.py --config tiny.yaml {device} {root}"
CNN = (
    "scripts/train.py --config configs/default.yaml --data.num_train 800 --data.num_test "
    "200 {root} {device} "
)
CNN += "--trainer.max_epochs 2 --figures_every_n_epochs 0"
RESUME = "--ckpt_path last --trainer.max_epochs"
BEST = "--ckpt_path {folder}/tiny/version_0/checkpoints/best.ckpt"


@dataclass
class Check:
    """commands: of python, one after the other; {device}, {root} and {folder} are filled in.

    alone: after all others, by itself. judge: what is wrong with the output of all of them, if
    anything.
    """

    name: str
    commands: list[str]
    needs_gpu: bool = False
    alone: bool = False
    judge: Callable[[str], str] = lambda output: ""
    result: str = "not run"
    seconds: float = 0.0
    note: str = ""
    warnings: list[str] = field(default_factory=list)


def same_numbers(output: str) -> str:
    """evaluate.py's last lines, of the GPU and of the CPU."""
    found = [json.loads(line) for line in output.splitlines() if line.startswith('{"test/')]
    if len(found) != 2:
        return f"{len(found)} results instead of 2"
    wrong = [name for name in found[0] if abs(found[0][name] - found[1][name]) > 1e-3]
    return f"{wrong} differ: {found}" if wrong else ""


def checks(dry: bool) -> list[Check]:
    devices = "2" if dry else "-1"  # all GPUs
    rows = [
        Check("train, with all pictures", [f"{CNN} --figures_every_n_epochs 1"]),
        *(
            Check(f"precision {name}", [f"{CNN} --trainer.precision {name}"], name == "16-true")
            for name in PRECISIONS
        ),
        *(
            Check(
                f"precision {name}, gradients clipped",
                [f"{CNN} --trainer.precision {name} --trainer.gradient_clip_val 1"],
            )
            for name in ("16-mixed", "bf16-mixed")
        ),
        *(Check(f"optimiser {name}", [f"{TINY} --model.optimizer {name}"]) for name in OPTIMIZERS),
        Check("several steps a call", [f"{TINY} --steps_per_execution 4"]),
        Check(
            "features",
            [
                "scripts/train.py --config configs/small_net.yaml --trainer.max_epochs 2 "
                "{root} {device}"
            ],
        ),
        Check(
            "views and parameter groups",
            [
                f"{CNN} --model.test_views lightbase.data.transforms.mirrored "
                "--model.parameter_groups.norms_and_biases.weight_decay 0"
            ],
        ),
        Check("compiled", [f"{CNN} --model.compile_net inductor"], needs_gpu=True),
        Check(
            "compiled to CUDA graphs",
            [f"{CNN} --model.compile_net inductor --model.compile_mode reduce-overhead"],
            needs_gpu=True,
        ),
        Check("workers, pinned", [f"{TINY} --data.num_workers 2"]),
        Check("not resident, pinned", [f"{TINY} --data.resident false"]),
        Check("resident, pin_memory true", [f"{TINY} --data.pin_memory true"], needs_gpu=True),
        Check(
            "resume GPU, CPU, GPU",
            [
                TINY,
                TINY.replace("{device}", f"--trainer.accelerator cpu {RESUME} 3"),
                f"{TINY} {RESUME} 4",
            ],
        ),
        *(
            Check(
                f"strategy {name}",
                [f"{TINY} --trainer.strategy {name} --trainer.devices {devices}"],
            )
            for name in ("ddp", "ddp_spawn", "ddp_fork")
        ),
        Check(
            "strategy dp", [f"{TINY} --trainer.strategy dp --trainer.devices -1"], needs_gpu=True
        ),
        Check(
            "torchrun",
            [
                "-m torch.distributed.run --standalone "
                f"--nproc-per-node={2 if dry else 'gpu'} -- {TINY}"
            ],
        ),
        Check(
            "evaluate on GPU and CPU",
            [
                TINY,
                f"scripts/evaluate.py {BEST} {{device}}",
                f"scripts/evaluate.py {BEST} --trainer.accelerator cpu",
            ],
            judge=same_numbers,
        ),
        Check(
            "export and predict",
            [
                TINY,
                f"scripts/export.py {BEST} --format pth --output {{folder}}/tiny.pth",
                "-c \"from PIL import Image; Image.new('RGB', (9, 9)).save('{folder}/grey.png')\"",
                f"scripts/predict.py {BEST} {{folder}}/grey.png",
            ],
        ),
        Check(
            "tune",
            [
                "scripts/tune.py --config tiny.yaml --find batch_size --max_batch_size "
                "64 {root} {device}",
                "scripts/tune.py --config configs/default.yaml --find lr {root} {device}",
            ],
        ),
        Check("waits", [f"waits.py {'--dry' * dry}"], alone=True),
        Check(
            "tests marked gpu",
            ["-m pytest -m gpu -o addopts= -q -rf .."],
            needs_gpu=True,
            alone=True,
        ),
        Check(
            "speed",
            [
                "../../benchmarks/benchmark.py --parts mnist cifar --rounds 1 --steps 300 "
                "> {folder}/speed.md"
            ],
            needs_gpu=True,
            alone=True,
        ),
    ]
    if importlib.util.find_spec("pytest") is None:
        rows = [row for row in rows if row.name != "tests marked gpu"]
    return rows


def run(check: Check, output: Path, dry: bool) -> None:
    """Fill in its result; what its commands print goes to a file."""
    if check.needs_gpu and dry:
        check.note = NO_GPU
        return
    start, text = time.monotonic(), ""
    with tempfile.TemporaryDirectory() as folder:
        device = f"--trainer.accelerator {'cpu' if dry else 'gpu'}"
        for template in check.commands:
            command = template.replace("{device}", device).replace(
                "{root}", "--trainer.default_root_dir {folder}"
            )
            command = f"{PYTHON} {command.replace('{folder}', folder)}"
            status, printed = call(command)
            text += f"$ {command}\n{printed}\n"
            if status:
                errors = [
                    line
                    for line in printed.splitlines()
                    if re.search(r"error", line, re.IGNORECASE)
                ]
                check.note = f"{status}: {errors[-1].strip()[:150] if errors else 'see its file'}"
                break
        for table in Path(folder).glob("*.md"):
            (output / table.name).write_text(table.read_text())
    check.note = check.note or check.judge(text)
    check.result, check.seconds = "failed" if check.note else "passed", time.monotonic() - start
    check.warnings = sorted(
        {line.split("Warning: ")[1][:120] for line in text.splitlines() if "Warning: " in line}
    )
    (output / f"{re.sub('[^a-z0-9]+', '_', check.name.lower())}.txt").write_text(text)
    print(f"{check.result:8}{check.seconds:5.0f} s  {check.name}  {check.note}", flush=True)


def call(command: str) -> tuple[str, str]:
    """What is wrong with its end, if anything, and what it prints."""
    paths = [str(REPO), str(HERE), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": ":".join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command,
        shell=True,
        cwd=HERE,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            printed, _ = process.communicate(timeout=LIMIT_S)
            return f"status {process.returncode}" if process.returncode else "", printed
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return f"more than {LIMIT_S} s", process.communicate()[0]


def table(rows: list[Check], dry: bool) -> str:
    names = "*(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))"
    # in a process of its own, which leaves the GPU after it
    code = f"import torch; print(torch.__version__, {names})"
    machine = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True
    ).stdout.strip()
    commit = subprocess.run(
        "git describe --always --dirty", shell=True, cwd=REPO, capture_output=True, text=True
    )
    version = (
        f"Python {sys.version.split()[0]}, torch {machine}, commit "
        f"{commit.stdout.strip() or 'unknown'}"
    )
    lines = [f"{'Dry run on a CPU. ' * dry}{version}, {time.strftime('%Y-%m-%d')}.", ""]
    lines += ["| check | result | seconds | |", "|---|---|---|---|"]
    for row in rows:
        result = "**failed**" if row.result == "failed" else row.result
        note = "; ".join(
            filter(None, [row.note, *(f"warns: {text}" for text in row.warnings)])
        ).replace("|", "\\|")
        lines.append(
            f"| {row.name} | {result} | {f'{row.seconds:.0f}' if row.seconds else ''} | {note} |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dry", action="store_true", help="on a CPU")
    parser.add_argument("--only", nargs="+", default=[""], help="checks whose names begin so")
    parser.add_argument("--at_once", type=int, help="commands; 8 on a GPU, 2 on a CPU")
    parser.add_argument(
        "--output", type=Path, help="folder of what is printed; a temporary one unless given"
    )
    options = parser.parse_args()
    output = options.output or Path(tempfile.mkdtemp(prefix="gpu_check_"))
    output.mkdir(parents=True, exist_ok=True)
    rows = [row for row in checks(options.dry) if row.name.startswith(tuple(options.only))]
    if not rows:
        parser.error(f"--only {' '.join(options.only)}: no check has such a name")
    with ThreadPoolExecutor(options.at_once or (2 if options.dry else 8)) as pool:
        list(
            pool.map(
                lambda row: run(row, output, options.dry), [row for row in rows if not row.alone]
            )
        )
    for row in rows:
        if row.alone:
            run(row, output, options.dry)
    text = table(rows, options.dry)
    text += "".join(f"\n{file.read_text()}" for file in output.glob("speed.md"))
    (output / "table.md").write_text(text)
    counts = {
        result: sum(row.result == result for row in rows)
        for result in ("passed", "failed", "not run")
    }
    print(
        f"\n{text}\n{', '.join(f'{number} {result}' for result, number in counts.items())}; "
        f"more in {output}"
    )
    return int(counts["failed"] > 0 or not counts["passed"])


if __name__ == "__main__":
    sys.exit(main())
