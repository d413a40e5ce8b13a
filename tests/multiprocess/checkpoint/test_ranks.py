"""Several ranks save and load: other layouts, shared work, and failures that every rank reports alike."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.base.errors import UserError
from megatron.checkpoint import storage
from megatron.checkpoint.find import read_tracker
from megatron.checkpoint.load import load_common, load_tensors
from megatron.checkpoint.logical import LogicalShard, boxes_of_flat_range, shard_of_local
from megatron.checkpoint.manifest import read_manifest
from megatron.checkpoint.save import save_checkpoint
from megatron.checkpoint.saver import CheckpointSaver
from megatron.distributed.errors import CommunicationError
from tests.support.spawn import RankFailure, run_ranks

pytestmark = pytest.mark.multiprocess

VOCAB, HIDDEN, LAYERS = 10, 8, 4


def whole_model(seed: int) -> dict[str, Tensor]:
    """All global tensors, as a single process would hold them."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    model = {"embedding": random(VOCAB, HIDDEN), "norm": random(HIDDEN)}
    for layer in range(LAYERS):
        model[f"layers.{layer}.column"] = random(4 * HIDDEN, HIDDEN)
        model[f"layers.{layer}.row"] = random(HIDDEN, 4 * HIDDEN)
    return model


class Rank:
    """A rank's part of the model and of a flat optimizer state.

    Ranks are numbered with tensor parallelism fastest, then data, then pipeline. The vocabulary is padded to
    a multiple of 4 TP rows, and layers go round the pipeline when ``virtual``.
    """

    def __init__(self, rank: int, tp: int, dp: int, pp: int, virtual: bool = False, seed: int | None = None) -> None:
        self.t, self.tp = rank % tp, tp
        self.d, self.dp = rank // tp % dp, dp
        stage = rank // (tp * dp)
        layers = [i for i in range(LAYERS) if (i % pp if virtual else i * pp // LAYERS) == stage]
        names = [f"layers.{i}.{kind}" for i in layers for kind in ("column", "row")]
        names += ["embedding"] * (stage in (0, pp - 1)) + ["norm"] * (stage == pp - 1)
        self.whole = whole_model(seed or 0)
        self.params = {name: self._block(name, seed is not None) for name in names}
        # the optimizer's moment: a slice of the concatenated local blocks, cut across their borders
        total = sum(x.numel() for x in self.params.values())
        self.start, self.stop = total * self.d // dp, total * (self.d + 1) // dp
        flat = torch.cat([x.reshape(-1) * 2 for x in self.params.values()])
        self.moment = flat[self.start : self.stop].clone()

    def _offsets(self, name: str) -> tuple[int, ...]:
        if name == "embedding":
            return (self._vocab_rows() * self.t, 0)
        if name.endswith("column"):
            return (4 * HIDDEN // self.tp * self.t, 0)
        return (0, 4 * HIDDEN // self.tp * self.t) if name.endswith("row") else (0,)

    def _vocab_rows(self) -> int:
        return -(-VOCAB // (4 * self.tp)) * 4

    def _block(self, name: str, filled: bool) -> Tensor:
        x = self.whole[name]
        if name == "embedding":
            padding = torch.full((self._vocab_rows() * self.tp - VOCAB, HIDDEN), float("nan"))
            x = torch.cat([x, padding])
        if name != "norm":
            x = x.tensor_split(self.tp, dim=1 if name.endswith("row") else 0)[self.t]
        return x.clone() if filled else torch.full_like(x, -1.0)

    def shards(self) -> dict[str, LogicalShard]:
        result, begin = {}, 0
        for name, block in self.params.items():
            shape, offsets = tuple(self.whole[name].shape), self._offsets(name)
            result[name] = shard_of_local(block, offsets, shape)
            start, stop = (min(max(x - begin, 0), block.numel()) for x in (self.start, self.stop))
            memory = self.moment[begin + start - self.start :][: stop - start]
            boxes = boxes_of_flat_range(block.shape, offsets, shape, memory, start, stop)
            result[f"moment.{name}"] = LogicalShard(shape, torch.float32, boxes)
            begin += block.numel()
        return result

    def check(self) -> None:
        """Every held element, parameter and moment, must be the global tensor's."""
        for name, shard in self.shards().items():
            expected = self.whole[name.removeprefix("moment.")] * (2 if name.startswith("moment.") else 1)
            for box in shard.boxes:
                box_slices = tuple(slice(o, o + s) for o, s in zip(box.offsets, box.tensor.shape, strict=True))
                assert torch.equal(box.tensor, expected[box_slices]), name


LAYOUTS = {
    1: [(1, 1, 1, False)],
    2: [(2, 1, 1, False), (1, 2, 1, False), (1, 1, 2, True)],
    3: [(1, 3, 1, False)],
    4: [(2, 2, 1, False), (1, 2, 2, False), (2, 1, 2, True)],
}


def save_layouts(root: str) -> None:
    """Saves a checkpoint per layout of this world size, and loads all existing checkpoints."""
    rank, world = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    earlier = sorted(Path(root).iterdir())
    dist.barrier()  # before anybody saves
    for number, layout in enumerate(LAYOUTS[world]):
        for path in earlier:
            rank_shard = Rank(rank, *layout)
            rank_shard.whole = whole_model(7)
            iteration = read_tracker(path)
            assert iteration == 5
            load_tensors(path, iteration, rank_shard.shards(), group)
            rank_shard.check()
        name = Path(root) / f"{world}-{number}"
        common = {"layout": layout}
        save_checkpoint(name, 5, Rank(rank, *layout, seed=7).shards(), common, "", group)
        assert load_common(name, 5) == common


def test_every_layout_loads_every_other(tmp_path: Path) -> None:
    for world in (2, 3, 4, 1, 2):  # the last, again, meets those of all sizes
        run_ranks(world, save_layouts, str(tmp_path))
    for path in tmp_path.iterdir():
        manifest = read_manifest(path / "iter_0000005")
        elements = sum(x.numel() for x in whole_model(7).values())
        data = sum(item.length for item in manifest.items.values())
        assert data == 2 * elements * 4  # nothing twice, no padding
        shares = [size for name, size in manifest.files.items() if name.endswith(".bin")]
        assert len(shares) == manifest.world_size


def fail_while_saving(root: str, failing: int, async_: bool) -> str:
    """The disk of a rank is full during the second save."""
    rank = dist.get_rank()
    saver = CheckpointSaver(root, dist.group.WORLD, async_=async_)
    saver.save(1, Rank(rank, 1, 2, 1, seed=1).shards(), {}, "")
    saver.finish_save()

    def full(stream: object, data: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    write_all = storage.write_all
    if rank == failing:
        storage.write_all = full
    try:
        saver.save(2, Rank(rank, 1, 2, 1, seed=2).shards(), {}, "")
        for _ in range(100_000):
            saver.poll()
        return "no error"
    except UserError as error:
        message = str(error)
    finally:
        storage.write_all = write_all
    dist.barrier()
    assert sorted(p.name for p in Path(root).iterdir()) == [
        "iter_0000001",
        "latest_checkpointed_iteration.txt",
    ]
    dist.barrier()
    rank_shard = Rank(rank, 1, 2, 1)
    rank_shard.whole = whole_model(1)
    load_tensors(root, 1, rank_shard.shards(), dist.group.WORLD)
    rank_shard.check()
    saver.save(3, Rank(rank, 1, 2, 1, seed=3).shards(), {}, "")
    saver.finish_save()
    assert read_tracker(root) == 3
    return message


@pytest.mark.parametrize(("failing", "async_"), [(1, False), (0, True)])
def test_a_full_disk_on_one_rank_fails_on_all(tmp_path: Path, failing: int, async_: bool) -> None:
    messages = run_ranks(2, fail_while_saving, str(tmp_path), failing, async_)
    assert messages[0] == messages[1]
    assert f"shard_0000{failing}.bin: No space left on device" in messages[0]
    assert f"(rank {failing})" in messages[0]


def save_two(root: str) -> None:
    for iteration in (1, 2):
        rank_shard = Rank(dist.get_rank(), 2, 1, 1, seed=iteration)
        save_checkpoint(root, iteration, rank_shard.shards(), {}, "", dist.group.WORLD)


def load_damaged(root: str) -> list[str]:
    """Damages files in turn on rank 0; returns every message."""
    rank, group = dist.get_rank(), dist.group.WORLD
    folder = Path(root) / "iter_0000002"
    messages = []
    for name in ("shard_00000.bin", "shard_00001.bin", "metadata.json"):
        for damage in ("flip", "truncate", "remove"):
            data = (folder / name).read_bytes()
            dist.barrier()
            if rank == 0 and damage == "flip":
                (folder / name).write_bytes(data[:-1] + bytes([data[-1] ^ 4]))
            elif rank == 0 and damage == "truncate":
                (folder / name).write_bytes(data[:-1])
            elif rank == 0:
                (folder / name).unlink()
            dist.barrier()
            rank_shard = Rank(rank, 2, 1, 1)
            before = [x.clone() for x in rank_shard.params.values()]
            try:
                load_tensors(root, 2, rank_shard.shards(), group)
            except UserError as error:
                messages.append(f"{name}: {error}")
            for x, y in zip(rank_shard.params.values(), before, strict=True):
                assert torch.equal(x.nan_to_num(5), y.nan_to_num(5))
            dist.barrier()
            if rank == 0:
                (folder / name).write_bytes(data)
            dist.barrier()
    return messages


def test_damage_is_reported_alike_on_every_rank(tmp_path: Path) -> None:
    run_ranks(2, save_two, str(tmp_path))
    messages = run_ranks(2, load_damaged, str(tmp_path))
    assert messages[0] == messages[1]
    assert len(messages[0]) == 9
    for message in messages[0]:
        name, _, text = message.partition(": ")
        assert name in text
        assert "iteration 1 is complete" in text


def load_as_another_model(root: str) -> str:
    """Rank 1 alone wants something that is not there."""
    rank_shard = Rank(dist.get_rank(), 2, 1, 1)
    shards = rank_shard.shards()
    if dist.get_rank() == 1:
        shards["layers.9.row"] = shard_of_local(torch.zeros(3), (0,), (3,))
    with pytest.raises(UserError) as error:
        load_tensors(root, 2, shards, dist.group.WORLD)
    return str(error.value)


def test_another_model_is_reported_alike_on_every_rank(tmp_path: Path) -> None:
    run_ranks(2, save_two, str(tmp_path))
    messages = run_ranks(2, load_as_another_model, str(tmp_path))
    assert messages[0] == messages[1]
    assert "layers.9.row is not in it" in messages[0]


def load_another_run_on_rank_1(root: str) -> tuple[str, bool]:
    """Each machine has its own disk, and one disk still has the checkpoint of another run."""
    rank = dist.get_rank()
    for run in (0, 1):
        shards = Rank(rank, 2, 1, 1, seed=run).shards()
        save_checkpoint(Path(root) / str(run), 1, shards, {}, "", dist.group.WORLD)
    rank_shard = Rank(rank, 2, 1, 1)
    with pytest.raises(UserError) as error:
        load_tensors(Path(root) / str(rank), 1, rank_shard.shards(), dist.group.WORLD)
    return str(error.value), all(bool((x == -1).all()) for x in rank_shard.params.values())


def test_checkpoints_of_two_runs_are_not_mixed(tmp_path: Path) -> None:
    for message, unchanged in run_ranks(2, load_another_run_on_rank_1, str(tmp_path)):
        assert "is not the same checkpoint on rank 0 and rank 1; give all machines the same files" in message
        assert unchanged


def save_async(root: str) -> None:
    """Training communicates on the same group while the background save does on its own."""
    rank = dist.get_rank()
    saver = CheckpointSaver(Path(root) / "async", dist.group.WORLD, async_=True)
    for iteration in (1, 2, 3):
        rank_shard = Rank(rank, 2, 1, 1, seed=iteration)
        saver.save(iteration, rank_shard.shards(), {"i": iteration}, "")
        for x in rank_shard.params.values():
            x.zero_()
        for _ in range(10):
            value = torch.ones(100)
            dist.all_reduce(value)
            assert value.sum() == 200
            saver.poll()
        rank_shard = Rank(rank, 2, 1, 1, seed=iteration)
        save_checkpoint(
            Path(root) / "sync",
            iteration,
            rank_shard.shards(),
            {"i": iteration},
            "",
            dist.group.WORLD,
        )
    saver.finish_save()


def test_async_saves_equal_synchronous_ones(tmp_path: Path) -> None:
    run_ranks(2, save_async, str(tmp_path))
    paths = [p.relative_to(tmp_path / "sync") for p in (tmp_path / "sync").rglob("*") if p.is_file()]
    assert len(paths) == 3 * 5 + 1
    for path in paths:
        assert (tmp_path / "sync" / path).read_bytes() == (tmp_path / "async" / path).read_bytes()


def lose_a_rank(root: str) -> None:
    """Rank 1 is gone in the middle of a save; rank 0 must not wait for ever, nor publish."""
    if dist.get_rank() == 1:
        storage.write_all = lambda stream, data: os._exit(9)
    rank_shard = Rank(dist.get_rank(), 2, 1, 1, seed=1)
    try:
        save_checkpoint(root, 3, rank_shard.shards(), {}, "", dist.group.WORLD)
    except CommunicationError as error:
        (Path(root) / "message").write_text(str(error))


def test_a_rank_that_dies_while_saving(tmp_path: Path) -> None:
    run_ranks(2, save_two, str(tmp_path))
    with pytest.raises(RankFailure):
        run_ranks(2, lose_a_rank, str(tmp_path))
    assert "a rank is gone" in (tmp_path / "message").read_text()
    assert read_tracker(tmp_path) == 2
    run_ranks(2, save_two, str(tmp_path))
    assert not [p.name for p in tmp_path.iterdir() if p.name.startswith(".")]
