"""Vision models in training: the decoder inputs of a packed micro-batch.

Invariant: every micro-batch of every rank runs the vision tower, because its layers are collectives over all ranks. A
micro-batch without images gets an extra sequence with an empty image, which is dropped.
"""

# I images, P patches, N packed tokens, H hidden size

from typing import Any

import torch
from tensordict import TensorDict
from transformers import PretrainedConfig, PreTrainedModel

from arealite.engine.packed_attention import PACKED
from arealite.utils.images import placeholder_mask, rope_positions


def attention_of_parts(attention: str) -> str | dict[str, str]:
    """Return the attention of each part: images attend within their windows, not within packed sequences."""
    return {"": attention, "text_config": attention, "vision_config": "sdpa"} if attention in PACKED else attention


def vision_inputs(packed: TensorDict, lengths: list[int], config: PretrainedConfig) -> tuple[dict[str, Any], list[int]]:
    """Return the inputs of `decoder_states`, `[N]` or `[3, N]`, of a micro-batch and the lengths of its sequences."""
    ids_N, merge = packed["input_ids"], config.vision_config.spatial_merge_size
    pixel_values, grids_BI3 = (packed.get(key, None) for key in ("pixel_values", "image_grid_thw"))
    if grids_BI3 is not None and grids_BI3.any():
        grids = grids_BI3[packed["cu_seqlens"].diff() > 0].cpu()
    else:
        _require_no_images(ids_N, config)
        lengths, grids = [*lengths, 1], torch.tensor([*[[[0, 0, 0]]] * len(lengths), [[1, merge, merge]]])
        ids_N = torch.cat([ids_N, ids_N.new_full((1,), config.image_token_id)])
        pixel_values = torch.zeros(merge**2, _patch_size(config), device=ids_N.device)
    is_image, positions = [], []
    for ids_L, grid_I3 in zip(ids_N.cpu().split(lengths), grids, strict=True):
        of_row = grid_I3[grid_I3.prod(-1) > 0]
        is_image.append(placeholder_mask(ids_L, int(of_row.prod(-1).sum()) // merge**2, config.image_token_id))
        positions.append(rope_positions(is_image[-1], of_row, merge))
    inputs = {
        "input_ids": ids_N,
        "position_ids": torch.cat(positions, 1),
        "is_image": torch.cat(is_image),
        "image_grid_thw": grids[grids.prod(-1) > 0],
    }
    return {key: value.to(ids_N.device) for key, value in inputs.items()} | {"pixel_values": pixel_values}, lengths


def decoder_states(
    model: PreTrainedModel,
    *,
    input_ids: torch.Tensor,
    is_image: torch.Tensor,
    pixel_values: torch.Tensor,
    image_grid_thw: torch.Tensor,
    **inputs: Any,
) -> torch.Tensor:
    """Return the hidden states `[1, N, H]`: what images become takes the place of their placeholders."""
    embeddings = model.get_input_embeddings()(input_ids)
    images = torch.cat(list(model.get_image_features(pixel_values, image_grid_thw).pooler_output))
    embeddings = embeddings.masked_scatter(is_image[None, :, None], images.to(embeddings.dtype))
    states: torch.Tensor = model.get_decoder()(inputs_embeds=embeddings, **inputs).last_hidden_state
    return states


def _patch_size(config: PretrainedConfig) -> int:
    vision = config.vision_config
    channels = getattr(vision, "in_channels", None) or vision.in_chans
    return int(channels * vision.temporal_patch_size * vision.patch_size**2)


def _require_no_images(ids_N: torch.Tensor, config: PretrainedConfig) -> None:
    """Refuse prompts whose images got lost; a placeholder alone is a token that the model has sampled."""
    follows_N = ids_N[:-1] == config.vision_start_token_id
    if (follows_N & (ids_N[1:] == config.image_token_id)).any():
        raise ValueError(
            "a batch of prompts with images must have pixel_values and image_grid_thw: got none. Use "
            "VisionRLVRWorkflow, or pass sft_batches a processor."
        )
