"""All senders of a broadcast, each in a thread of this process."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import torch

from arealite.api.io_struct import WeightUpdateMeta
from arealite.utils.weight_transfer import (
    BroadcastGroup,
    close_group,
    group_of,
    host_group,
    join_group,
    send_bucket,
    senders_of,
)


class Senders:
    """What ranks of a trainer are in an update."""

    def __init__(self, meta: WeightUpdateMeta) -> None:
        """Form the groups, as rank 0 and the others do."""
        size, more = meta.transfer.world_size, {"timeout_s": meta.timeout_s}
        place = meta.transfer.meeting_point
        names = {sender: group_of(meta.transfer.group_name, sender) for sender in senders_of(meta.nccl_param_specs)}
        self.groups: dict[int, BroadcastGroup] = {}
        self._pool = ThreadPoolExecutor(len(names))
        others = {
            sender: self._pool.submit(join_group, *place, 0, size, name, timeout_s=meta.timeout_s, is_hosted=True)
            for sender, name in names.items()
            if sender
        }
        self._stores = []
        for num_before, (sender, name) in enumerate(names.items()):
            if sender:
                self._stores.append(host_group(*place, size, name, num_before=num_before, **more))
                self.groups[sender] = others[sender].result()
            else:
                self.groups[sender] = join_group(*place, 0, size, name, **more)

    def send(self, meta: WeightUpdateMeta, weights: Mapping[str, torch.Tensor]) -> None:
        """Let every sender send its part of each bucket."""
        for specs in meta.nccl_param_specs:
            parts = {sender: [weights[one.name] for one in specs if one.owner == sender] for sender in self.groups}
            for sent in [self._pool.submit(send_bucket, self.groups[one], part) for one, part in parts.items()]:
                sent.result()
        meta.transfer.uploaded.set_result(None)

    def close(self) -> None:
        for group in self.groups.values():
            close_group(group)
        self._pool.shutdown()
