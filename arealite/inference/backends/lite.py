"""Our embedded server `arealite.server`: SGLang's protocol, with fingerprints, deadlines, counts of stale tokens, and
buckets of several senders."""

from collections.abc import Sequence
from typing import Any

from arealite.inference.backends.base import Bucket, MismatchError, Sent, described
from arealite.inference.backends.sglang import SGLangBackend
from arealite.inference.http import Json, ServerConnection, StatusError
from arealite.inference.pool import ServerFacts

_MISMATCH = 409  # status of a reply that refuses tensors with other fingerprints


class LiteBackend(SGLangBackend):
    """The protocol of `arealite.server`."""

    verifies = frozenset({"disk", "nccl"})
    receives_at_once = True
    stages = True
    is_on_cpu = True

    async def _inspect(self, server: ServerConnection) -> ServerFacts:
        info = await server.request("GET", "/get_model_info")
        self._takes_seeds.add(server.address)
        names = {"model": "model_path", "vocab_size": "vocab_size", "slots": "slots"}
        told: dict[str, Any] = {name: info.get(key) for name, key in names.items()}
        return ServerFacts(str(info["dtype"]), **told)

    async def join(self, server: ServerConnection, place: Json, timeout_s: float) -> None:
        await super().join(server, place | {"timeout_s": timeout_s}, timeout_s)

    async def receive(self, server: ServerConnection, buckets: Sequence[Bucket], version: int) -> None:
        payload = described(buckets) | {"weight_version": str(version)}
        await server.request("POST", "/update_weights_from_distributed", payload)

    async def swap(self, server: ServerConnection) -> None:
        await server.request("POST", "/end_weight_update")

    async def _verified(self, server: ServerConnection, endpoint: str, payload: Json, sent: Sent) -> list[str]:
        payload |= {"only_stage": True, "is_partial": sent.is_partial}
        if sent.fingerprints:
            payload |= {
                "fingerprints": sent.fingerprints,
                "on_mismatch": "accept" if self._accepts_mismatch else "refuse",
            }
        try:
            return await super()._verified(server, endpoint, payload, sent)
        except StatusError as error:
            if error.status != _MISMATCH:
                raise
            raise MismatchError(str(error)) from error
