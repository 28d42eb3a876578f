"""What only a GPU can prove: the scripts in every precision, with every optimiser and
strategy, compiled, resumed, killed and out of memory; transforms, waits, speed; and the
tests marked `gpu`.

bash tests/gpu_check.sh                    # a quarter of an hour, with a GPU
bash tests/gpu_check.sh --dry              # the same commands on a CPU
bash tests/gpu_check.sh --only waits ddp   # checks whose names begin so

It needs no network. It ends with a table in markdown, for docs/performance.md, and
status 1 if a check has failed. Its folder, `--output`, keeps the table and what each
command has printed. Packages may be on PYTHONPATH; PYTHON is another interpreter.
"""

import argparse
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent  # a small repository, with scripts/ and configs/
REPO = HERE.parents[1]
PYTHON = shlex.quote(sys.executable)
# in CI's simulation: it has no speed and no Triton
IS_SIMULATED = "SIMGPU_FOLDER" in os.environ
PRECISIONS = ("32-true", "16-mixed", "bf16-mixed", "16-true", "bf16-true", "64-true")
FUSED = ("SGD", "Adam", "AdamW", "Adagrad")  # by default; the others have no fused step
UNFUSED = ("Adadelta", "Adamax", "Adafactor", "NAdam", "RAdam", "RMSprop", "Rprop")

TINY = "scripts/train.py --config tiny.yaml {device} {root}"
CNN = "scripts/train.py --config configs/default.yaml {device} {root} --figures_every_n_epochs 0 "
CNN += "--data.num_train 800 --data.num_test 200 --trainer.max_epochs 2"
SHORT = f"{CNN} --trainer.precision 32-true --model.lr 0.001"
GRAPHS = "--model.compile_mode reduce-overhead"
RESUME = "--ckpt_path last --trainer.max_epochs"
BEST = "--ckpt_path {folder}/tiny/version_0/checkpoints/best.ckpt {root}"


@dataclass
class Check:
    """commands: of python, one after the other; {device}, {root}, {folder} and {output}
    are filled in.

    needs_gpu: not in a dry run. needs_real_gpu: nor on a simulated one. alone: after
    all others, by itself. judge: what is wrong with the output of all of them, if
    anything.
    """

    name: str
    commands: list[str]
    needs_gpu: bool = False
    needs_real_gpu: bool = False
    alone: bool = False
    limit_s: int = 300  # a command
    judge: Callable[[str], str] = lambda output: ""
    result: str = "not run"
    seconds: float = 0.0
    note: str = ""


def same_numbers(output: str, tolerance: float = 1e-3) -> str:
    """What differs between the test results of the last two commands."""
    results = []
    for line in re.findall(r"^Test of .*?: .*|^{.*}$", output, re.MULTILINE):
        pairs = re.findall(
            r"(test/\w+)\W+([\d.]+)", line
        )  # of train.py and evaluate.py
        results.append({name: float(number) for name, number in pairs})
    one, other = results[-2:]
    wrong = [name for name in one if abs(one[name] - other[name]) > tolerance]
    return f"{wrong} differ: {one}, {other}" if wrong else ""


def training() -> Iterator[Check]:
    yield Check("train, with all pictures", [f"{CNN} --figures_every_n_epochs 1"])
    for name in PRECISIONS:
        command = f"{CNN} --trainer.precision {name}"
        yield Check(f"precision {name}", [command], name == "16-true")
    for name in (*FUSED, *UNFUSED):
        unfused = "--model.optimizer_args.fused false" if name in FUSED else ""
        command = f"{TINY} --model.optimizer {name}"
        yield Check(f"optimiser {name}", [command])
        mixed = f"{command} {unfused} --trainer.precision 16-mixed"
        yield Check(f"optimiser {name}, 16-mixed, not fused", [mixed])
    features = "scripts/train.py --config configs/small_net.yaml --trainer.max_epochs 2"
    yield Check("features", [f"{features} {{root}} {{device}}"])
    groups = "--model.parameter_groups.norms_and_biases '{weight_decay: 0}'"
    yield Check("parameter groups", [f"{CNN} {groups}"])
    yield Check("workers, pinned", [f"{TINY} --data.num_workers 2"])
    yield Check("not resident, pinned", [f"{TINY} --data.resident false"])
    pinned = f"{TINY} --data.pin_memory true"
    yield Check("resident, pin_memory true", [pinned], needs_gpu=True)


def compiled(dry: bool) -> Iterator[Check]:
    """Compiled runs with the numbers of one that is not. On a CPU they only trace the
    network."""
    backend, graphs = ("aot_eager", "") if dry else ("inductor", GRAPHS)
    for name, more in (("compiled", ""), ("compiled to CUDA graphs", graphs)):
        commands = [SHORT, f"{SHORT} {more} --model.compile_net {backend}"]
        # an image or two of 200 may get another class
        check = Check(name, commands, judge=lambda output: same_numbers(output, 0.02))
        check.needs_real_gpu = not dry  # a dry run only traces
        yield check


def replayed() -> Iterator[Check]:
    for name in ("small_net", "discs_mlp", "default", "mnist_mlp", "cifar10_cnn"):
        command = f"gpu_compare.py graphs {{folder}} {name} {{device}}"
        check = Check(f"replayed steps, {name}", [command], needs_gpu=True)
        check.needs_real_gpu = True  # a simulated one records nothing
        yield check


def devices(dry: bool) -> Iterator[Check]:
    on_cpu = TINY.replace("{device}", f"--trainer.accelerator cpu {RESUME} 3")
    yield Check("resume GPU, CPU, GPU", [TINY, on_cpu, f"{TINY} {RESUME} 4"])
    number = "2" if dry else "-1"  # all GPUs
    for name in ("ddp", "ddp_spawn", "ddp_fork", "dp"):
        command = f"{TINY} --trainer.strategy {name} --trainer.devices {number}"
        yield Check(f"strategy {name}", [command], needs_gpu=name == "dp")
    each = 2 if dry else "gpu"
    torchrun = f"-m torch.distributed.run --standalone --nproc-per-node={each} --"
    yield Check("torchrun", [f"{torchrun} {TINY}"])
    killed = "gpu_compare.py killed {folder} {device}"
    yield Check("deterministic, killed and resumed", [killed])
    yield Check("out of memory", ["gpu_compare.py memory {device} {root}"])
    yield Check("augmentations", [f"gpu_compare.py augment {'cpu' if dry else 'cuda'}"])


def scripts() -> Iterator[Check]:
    evaluate = f"scripts/evaluate.py {BEST}"
    on_both = [TINY, f"{evaluate} {{device}}", f"{evaluate} --trainer.accelerator cpu"]
    yield Check("evaluate on GPU and CPU", on_both, judge=same_numbers)
    export = f"scripts/export.py {BEST} --format pth --output {{folder}}/tiny.pth"
    image = "-c \"from PIL import Image; Image.new('RGB', (9, 9)).save('{folder}/grey.png')\""
    predict = f"scripts/predict.py {BEST} {{folder}}/grey.png"
    yield Check("export and predict", [TINY, export, image, predict])
    tune = "scripts/tune.py {root} {device} --config"
    batch_size = f"{tune} tiny.yaml --find batch_size --max_batch_size 64"
    yield Check("tune", [batch_size, f"{tune} configs/default.yaml --find lr"])


def measured() -> Iterator[Check]:
    yield Check("waits", ["-m pytest -o addopts= -q -rf test_waits.py"], alone=True)
    if not IS_SIMULATED:  # CI calls them by themselves
        tests = "-m pytest -m gpu -o addopts= -q -rf .."
        yield Check("tests marked gpu", [tests], needs_gpu=True, alone=True)
    speed = "../../benchmarks/benchmark.py --parts mnist cifar --rounds 1 --steps 300"
    check = Check("speed", [f"{speed} > {{output}}/speed.md"], alone=True, limit_s=1800)
    check.needs_real_gpu = True
    yield check


def run(check: Check, output: Path, dry: bool) -> None:
    """Fill in its result; what its commands print goes to a file."""
    if check.needs_real_gpu and (dry or IS_SIMULATED):
        check.note = "needs a real GPU"
        return
    if check.needs_gpu and dry:
        check.note = "needs a GPU"
        return
    start, text = time.monotonic(), ""
    with tempfile.TemporaryDirectory() as folder:
        places = {
            "device": f"--trainer.accelerator {'cpu' if dry else 'gpu'}",
            "root": f"--trainer.default_root_dir {folder}",
            "folder": folder,
            "output": str(output.resolve()),
        }
        for template in check.commands:
            command = f"{PYTHON} {template}"
            for name, value in places.items():
                command = command.replace(f"{{{name}}}", value)
            problem, printed = call(command, check)
            text += f"$ {command}\n{printed}\n"
            if problem:
                errors = re.findall(r".*error.*", printed, re.IGNORECASE)
                last = [problem, *errors][-1].strip()[:150]
                check.note = f"{problem}: {last}"
                break
    check.note = check.note or check.judge(text)
    check.result = "failed" if check.note else "passed"
    check.seconds = time.monotonic() - start
    (output / f"{re.sub('[^a-z0-9]+', '_', check.name.lower())}.txt").write_text(text)
    print(f"{check.result:8}{check.seconds:5.0f} s  {check.name}  {check.note}")


def call(command: str, check: Check) -> tuple[str, str]:
    """What is wrong with its end, if anything, and what it prints."""
    paths = [str(REPO), str(HERE), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": ":".join(filter(None, paths))}
    if not check.alone:
        environment["OMP_NUM_THREADS"] = "1"
    options: dict[str, Any] = {"cwd": HERE, "env": environment, "text": True}
    options |= {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "shell": True}
    with subprocess.Popen(command, start_new_session=True, **options) as process:
        try:
            printed, _ = process.communicate(timeout=check.limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return f"more than {check.limit_s} s", process.communicate()[0]
    if process.returncode:
        return f"status {process.returncode}", printed
    return "", printed


def table(rows: list[Check], dry: bool) -> str:
    names = "*(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))"
    # in a process of its own, which leaves the GPU after it
    code = f"import torch; print('torch', torch.__version__, {names})"
    machine = subprocess.check_output([sys.executable, "-c", code], text=True).strip()
    version = (
        f"Python {sys.version.split()[0]}, {machine}, {time.strftime('%Y-%m-%d')}."
    )
    lines = [f"{'Dry run on a CPU. ' * dry}{version}", ""]
    lines += ["| check | result | seconds | |", "|---|---|---|---|"]
    for row in rows:
        result = row.result.replace("failed", "**failed**")
        note = row.note.replace("|", "\\|")
        lines.append(f"| {row.name} | {result} | {row.seconds:.0f} | {note} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--dry", action="store_true", help="on a CPU")
    parser.add_argument("--only", nargs="+", default=[""], help="beginnings of names")
    parser.add_argument("--output", type=Path, help="folder of what is printed")
    options = parser.parse_args()
    output = options.output or Path(tempfile.mkdtemp(prefix="gpu_check_"))
    output.mkdir(parents=True, exist_ok=True)
    dry = options.dry
    checks = [*training(), *compiled(dry), *replayed(), *devices(dry), *scripts()]
    checks += measured()
    rows = [row for row in checks if row.name.startswith(tuple(options.only))]
    with ThreadPoolExecutor(2 if dry or IS_SIMULATED else 8) as pool:
        together = [row for row in rows if not row.alone]
        list(pool.map(lambda row: run(row, output, dry), together))
    for row in rows:
        if row.alone:
            run(row, output, dry)
    text = table(rows, dry)
    text += "".join(f"\n{file.read_text()}" for file in output.glob("speed.md"))
    (output / "table.md").write_text(text)
    results = [row.result for row in rows]
    words = ("passed", "failed", "not run")
    counts = ", ".join(f"{results.count(word)} {word}" for word in words)
    print(f"\n{text}\n{counts}; more in {output}")
    return int("failed" in results or "passed" not in results)


if __name__ == "__main__":
    sys.exit(main())
