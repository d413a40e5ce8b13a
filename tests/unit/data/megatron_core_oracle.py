"""Runs megatron-core's datasets in a process of their own and prints what they serve, as JSON.

Called with the folder that holds megatron-core and a JSON file of cases. Its `megatron` namespace and ours
collide, so only that folder's is made importable here. Tests find the folder through MEGATRON_CORE_ORACLE,
and make it with `pip install --no-deps --target FOLDER megatron-core==0.16.1`.
"""

from __future__ import annotations

import importlib
import json
import sys
import types
from pathlib import Path
from typing import Any


def use_folder(folder: str) -> None:
    """Make `import megatron.core` find this folder's, whatever else is installed."""
    namespace = types.ModuleType("megatron")
    namespace.__path__ = [str(Path(folder) / "megatron")]
    sys.modules["megatron"] = namespace


def core(name: str) -> Any:
    """The module `name` of megatron-core's datasets."""
    return importlib.import_module(f"megatron.core.datasets.{name}")


class StubTokenizer:
    """Attributes of a tokenizer that the dataset's configuration reads."""

    vocab_size = None
    eod = 0
    pad = -1
    unique_identifiers: dict[str, str] = {}  # noqa: RUF012


def write_file(case: dict[str, Any]) -> dict[str, Any]:
    """Write documents with megatron-core's builder."""
    import numpy as np

    builder = core("indexed_dataset").IndexedDatasetBuilder(case["prefix"] + ".bin", dtype=getattr(np, case["dtype"]))
    for tokens, lengths in case["documents"]:
        builder.add_document(tokens, lengths)
    builder.finalize(case["prefix"] + ".idx")
    return {}


def read_file(case: dict[str, Any]) -> dict[str, Any]:
    """Read every sequence with megatron-core's reader."""
    dataset = core("indexed_dataset").IndexedDataset(case["prefix"])
    return {
        "sequences": [dataset[i].tolist() for i in range(len(dataset))],
        "documents": dataset.document_indices.tolist(),
        "dtype": str(dataset[0].dtype),
    }


def gpt_samples(case: dict[str, Any]) -> dict[str, Any]:
    """All samples of the three splits."""
    import numpy as np

    per_split = case.get("blend_per_split")
    gpt = core("gpt_dataset")
    config = gpt.GPTDatasetConfig(
        random_seed=case["seed"],
        sequence_length=case["seq_length"],
        blend=tuple(case["blend"]) if case.get("blend") else None,
        blend_per_split=[tuple(blend) if blend else None for blend in per_split] if per_split else None,
        split=case.get("split"),
        path_to_cache=None,
        tokenizer=StubTokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    served: list[Any] = []
    builder = core("blended_megatron_dataset_builder").BlendedMegatronDatasetBuilder
    for dataset in builder(gpt.GPTDataset, case["sizes"], lambda: True, config).build():
        if dataset is None:
            served.append(None)
            continue
        samples = []
        for index in range(len(dataset)):
            item = dataset[index]
            samples.append(np.append(item["tokens"].numpy(), item["labels"].numpy()[-1]).tolist())
        served.append(samples)
    return {"splits": served}


class WordPieces(StubTokenizer):
    """Attributes of a tokenizer that the masked datasets read; [PAD] is 0."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.inv_vocab = dict(enumerate(case["tokens"]))
        number = {token: token_id for token_id, token in self.inv_vocab.items()}
        self.pad = number["[PAD]"]
        self.cls, self.sep, self.mask = number["[CLS]"], number["[SEP]"], number["[MASK]"]
        self.bos, self.eos, self.eod = number["[BOS]"], number["[EOS]"], number["[EOS]"]
        self.additional_special_tokens_ids = case["sentinels"]


def masked_samples(case: dict[str, Any]) -> dict[str, Any]:
    """All samples of the three splits, of BERT or T5."""
    import numpy as np
    import torch

    # Rank 0 alone builds the order.
    distributed: Any = torch.distributed
    distributed.get_rank = lambda: 0
    model = core(f"{case['model'].lower()}_dataset")
    config = getattr(model, f"{case['model']}MaskedWordPieceDatasetConfig")(
        random_seed=case["seed"],
        sequence_length=case["seq_length"],
        blend=tuple(case["blend"]) if case.get("blend") else None,
        split=case["split"],
        path_to_cache=case["cache"],
        tokenizer=WordPieces(case),
        masking_probability=case["mask_prob"],
        short_sequence_probability=case["short_seq_prob"],
        masking_do_full_word=True,
        masking_do_permutation=False,
        masking_use_longer_ngrams=False,
        **case["more"],
    )
    builder = core("blended_megatron_dataset_builder").BlendedMegatronDatasetBuilder
    served: list[Any] = []
    for dataset in builder(
        getattr(model, f"{case['model']}MaskedWordPieceDataset"), case["sizes"], lambda: True, config
    ).build():
        items = [] if dataset is None else [dataset[index] for index in range(len(dataset))]
        served.append([{key: np.asarray(value).tolist() for key, value in item.items()} for item in items])
    return {"splits": served}


def masks(case: dict[str, Any]) -> dict[str, Any]:
    """Attention mask, loss mask and positions of a sequence under all resets."""
    import torch

    attention, loss, positions = core("gpt_dataset")._get_ltor_masks_and_position_ids(
        torch.tensor(case["tokens"]), case["eod"], True, True, True, True
    )
    return {"masked": attention[0].tolist(), "loss": loss.tolist(), "positions": positions.tolist()}


def main() -> None:
    """FOLDER CASES.json ANSWERS.json"""
    use_folder(sys.argv[1])
    cases = json.loads(Path(sys.argv[2]).read_text())
    answers = [globals()[case["what"]](case) for case in cases]
    Path(sys.argv[3]).write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
