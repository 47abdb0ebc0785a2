"""The loss of a critic."""

# N packed tokens

from collections.abc import Mapping

import torch


def critic_loss(
    values: torch.Tensor, batch: Mapping[str, torch.Tensor], *, eps_clip: float | None = None
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return max((v - R)^2, (clip(v, old +- eps_clip) - R)^2) / 2 per token, for `values [N]`, and statistics.

    `batch` has `values` (the old ones), `returns` and `loss_mask`, `[N]`. Without `eps_clip`: (v - R)^2 / 2.
    """
    mask_N = batch["loss_mask"].bool()
    values_N = torch.where(mask_N, values, 0.0)
    returns_N = torch.where(mask_N, batch["returns"], 0.0)
    errors_N = (values_N - returns_N).square()
    is_clipped_N = torch.zeros_like(mask_N)
    if eps_clip is not None:
        old_N = torch.where(mask_N, batch["values"], 0.0)
        clipped_errors_N = (values_N.clamp(old_N - eps_clip, old_N + eps_clip) - returns_N).square()
        is_clipped_N = clipped_errors_N > errors_N
        errors_N = torch.maximum(errors_N, clipped_errors_N)
    return 0.5 * errors_N, {"value": values_N.detach(), "clip_ratio": is_clipped_N}
