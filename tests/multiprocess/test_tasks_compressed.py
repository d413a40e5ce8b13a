"""Fine-tuning with compressors at every point: BERT and GPT learn, with replicas that agree and go on exactly."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.evaluation.command import main
from tests.support.combinations import mark_repeats
from tests.support.events import read_events
from tests.support.spawn import run_ranks
from tests.support.tasks import task_flags, write_tsv, write_vocabulary

pytestmark = pytest.mark.multiprocess

COMPRESS = ["pp-forward=delta,bits=4", "pp-backward=fixpoint,bits=8", "dp-grad=powersgd,rank=4"]
LAYOUT = {"pipeline_model_parallel_size": 2, "sample_order": "fixed"}


def _run(flags: list[str]) -> None:
    status = main(flags)
    assert status == 0, status


@pytest.mark.parametrize("model_type", mark_repeats(["bert", "gpt"], keep=["bert"]))
def test_a_task_is_learned_with_compressors_at_every_point(model_type: str, tmp_path: Path) -> None:
    """Messages of changes since a sample's last visit, quantized gradients, and low-rank sums over replicas."""
    vocabulary = write_vocabulary(tmp_path)
    train, valid = write_tsv(tmp_path / "train.tsv", "SST-2", 256), write_tsv(tmp_path / "dev.tsv", "SST-2", 40, 1)

    def flags(**changes: object) -> list[str]:
        sizes: dict[str, object] = {"epochs": 4, "micro_batch_size": 4, "global_batch_size": 16, "hidden_size": 32}
        sizes |= {"seq_length": 12, "lr": 3e-3, "init_method_std": 0.2, "seed": 2}
        common = {**LAYOUT, "model_type": model_type, "check_replicas": 4, "log_comm": True, "log_interval": 1}
        flags_of_run = {**common, **sizes, "compress": COMPRESS, **changes}
        return task_flags(vocabulary, "SST-2", [train], [valid], **flags_of_run)

    logs = [tmp_path / name for name in ("whole", "rest")]
    run_ranks(4, _run, flags(log_json_file=logs[0], save=tmp_path / "saved"), timeout=240, init=False)
    accuracies = [event["scores"]["dev.tsv"]["accuracy"] for event in read_events(logs[0], "validation")]
    assert len(accuracies) == 4
    assert accuracies[-1] > 0.9, accuracies
    steps = read_events(logs[0])
    ratios = {
        point: [step["comm"][point]["raw_bytes"] / step["comm"][point]["wire_bytes"] for step in (steps[0], steps[-1])]
        for point in ("pp-forward", "pp-backward", "dp-grad")
    }
    # First visits are sent in half precision.
    assert ratios["pp-forward"][0] < 2.1 < 6 < ratios["pp-forward"][1], ratios
    assert ratios["pp-backward"][1] > 3, ratios
    assert ratios["dp-grad"][1] > 1.5, ratios
    # From the checkpoint before the last epoch the run goes on with its compressors' state.
    going_on = {"load": tmp_path / "saved", "ckpt_step": steps[-1]["iteration"] * 3 // 4}
    run_ranks(4, _run, flags(log_json_file=logs[1], **going_on), timeout=240, init=False)
    resumed = [(step["iteration"], step["classification_loss"], step["grad_norm"]) for step in read_events(logs[1])]
    uninterrupted = [(step["iteration"], step["classification_loss"], step["grad_norm"]) for step in steps]
    assert resumed == uninterrupted[-len(resumed) :]
    assert len(resumed) == len(uninterrupted) // 4
