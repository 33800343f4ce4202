"""DeepSeek-V3 with multi-token prediction in plain PyTorch, from the layers of `transformers`."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as v3

from tests.hf_decoders import STEPS, Trained, batch, casts, documents, make
from tests.interop.test_moe_families import tensors
from threed.testing.ranks import preload

FACTOR = 0.3
IGNORED = -100
preload("tests.mtp_reference")


def reference(depths: int, **changes: Any) -> Any:
    """Returns a module of `transformers` with further layers, which its own forward ignores."""
    module = make("deepseek_v3", num_mtp_layers=depths, num_hidden_layers=2, **changes)
    config, draw = module.config, torch.Generator().manual_seed(2)
    for depth in range(depths):
        layer = v3.DeepseekV3DecoderLayer(config, config.num_hidden_layers + depth)
        layer.embed_tokens = module.model.embed_tokens
        layer.enorm, layer.hnorm = (v3.DeepseekV3RMSNorm(config.hidden_size) for _ in range(2))
        layer.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        layer.shared_head = nn.Module()
        layer.shared_head.norm = v3.DeepseekV3RMSNorm(config.hidden_size)
        shared = {id(param) for param in module.parameters()}
        layer.double()
        with torch.no_grad():
            for param in layer.parameters():
                if id(param) not in shared:
                    start = 1.0 if param.dim() == 1 else 0.0
                    param.copy_(start + 0.1 * torch.randn(param.shape, generator=draw))
        layer.shared_head.head = module.lm_head
        module.model.layers.append(layer)
    for name, buffer in module.named_buffers():
        if "correction_bias" in name:
            buffer.copy_(0.1 * torch.randn(buffer.shape, generator=draw))
    return module


def losses(module: Any, data: dict[str, Tensor], numbers: Tensor) -> list[Tensor]:
    """Returns the loss of the main model, and of each depth, as means over the labels of the main model.

    Args:
        module: the result of `reference`.
        data: the batch, with tokens and labels [b s].
        numbers: the document of each token, [b s].
    """
    (rows, length), model = data["tokens"].shape, module.model
    mask = torch.full((rows, 1, length, length), -torch.inf, dtype=torch.float64)
    positions = torch.zeros(rows, length, dtype=torch.int64)
    for row in range(rows):
        for i in range(length):
            inside = [j for j in range(i + 1) if numbers[row, j] == numbers[row, i]]
            mask[row, 0, i, inside], positions[row, i] = 0.0, len(inside) - 1
    with casts(torch.float64):
        state = model(
            input_ids=data["tokens"], attention_mask=mask, position_ids=positions
        ).last_hidden_state
        turned = model.rotary_emb(state, positions)
        states = [state]
        for depth, layer in enumerate(model.layers[module.config.num_hidden_layers :], 1):
            ids = torch.zeros_like(data["tokens"])
            for i in range(length - depth):
                ids[:, i] = data["tokens"][:, i + depth]
            both = (layer.enorm(layer.embed_tokens(ids)), layer.hnorm(states[-1]))
            x = layer.eh_proj(torch.cat(both, -1))
            x = layer(x, attention_mask=mask, position_embeddings=turned, position_ids=positions)
            states.append(layer.shared_head.norm(x))
        all_logits = [module.lm_head(state) for state in states]
    given = main_labels(data["labels"], numbers)
    found, count = [], (given != IGNORED).sum()
    for depth, logits in enumerate(all_logits):
        labels = torch.full_like(data["labels"], IGNORED)
        for row in range(rows):
            for i in range(length - depth):
                if numbers[row, i] == numbers[row, i + depth]:
                    labels[row, i] = given[row, i + depth]
        summed = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        found.append(summed / count)
    return found


def main_labels(labels: Tensor, numbers: Tensor) -> Tensor:
    """Returns labels [b s] of which the last one of each document is ignored."""
    out = labels.clone()
    for row, i in torch.nonzero(numbers[:, 1:] != numbers[:, :-1]).tolist():
        out[row, i] = IGNORED
    return out


def inputs(step: int, packed: bool) -> tuple[dict[str, Tensor], Tensor]:
    """Returns the batch of a step, and its documents: one per row without `packed`."""
    data = batch(step)
    return data, documents(step) if packed else torch.zeros_like(data["tokens"])


def save(module: Any, folder: Path) -> None:
    """Writes a folder without the copies of embedding and head."""
    copies = (".embed_tokens.weight", ".shared_head.head.weight")
    state = {
        name: value
        for name, value in module.state_dict().items()
        if not (name.startswith("model.layers.") and name.endswith(copies))
    }
    module.save_pretrained(folder, state_dict=state)


def weights(module: Any) -> dict[str, Tensor]:
    """Returns the weights as in files, without the copies."""
    with tempfile.TemporaryDirectory() as folder:
        save(module, Path(folder))
        return tensors(Path(folder))


def train_plainly(module: Any, packed: bool = False) -> tuple[Trained, list[float]]:
    """Trains by torch's AdamW; returns the results, and the mean loss of the depths per step.

    `Trained.losses` are those of the main model.
    """
    params, depths = list(module.train().parameters()), module.config.num_mtp_layers
    groups = [
        {"params": [p for p in params if (p.dim() > 1) == decays], "weight_decay": 0.1 * decays}
        for decays in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95), eps=1e-8)
    main_losses, norms, further_losses = [], [], []
    for step in range(STEPS):
        main, *further = losses(module, *inputs(step, packed))
        mean = torch.stack(further).mean() if depths else torch.zeros(())
        optimizer.zero_grad()
        (main + FACTOR * mean).backward()
        norms.append(float(nn.utils.clip_grad_norm_(params, 0.5)))
        optimizer.step()
        main_losses.append(main.item())
        further_losses.append(mean.item())
    return Trained(main_losses, norms, weights(module)), further_losses
