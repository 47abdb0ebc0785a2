"""What the Tinker SDK sends and wants back as protobuf: batches of data, logprobs and samples."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from tinker.proto import tinker_public_pb2 as proto

from arealite.api.io_struct import ModelResponse

_DTYPES = {proto.DTYPE_FLOAT32: "<f4", proto.DTYPE_INT64: "<i8"}


def read_batch(data: Sequence[Any], names: Sequence[str], num_ids: int, max_tokens: int) -> TensorDict:
    """Return data as `input_ids`, `attention_mask`, `target_tokens` and the named float32 inputs of a loss, `[B, S]`.

    Raises ValueError for what is no text, or does not fit the model or the loss.
    """
    if not data:
        raise ValueError("data must have at least one datum: got none. Send some.")
    wanted, rows = {"target_tokens", *names}, []
    for index, datum in enumerate(data):
        tokens = _tokens_of(datum, index)
        if not 0 < len(tokens) <= max_tokens:
            raise ValueError(f"datum {index} must have 1 to {max_tokens} tokens: got {len(tokens)}. Shorten it.")
        if datum.loss_fn_inputs.keys() != wanted:
            got = ", ".join(sorted(datum.loss_fn_inputs)) or "none"
            raise ValueError(f"datum {index} must have loss_fn_inputs {', '.join(sorted(wanted))}: got {got}.")
        row = {"input_ids": tokens}
        for name, tensor in datum.loss_fn_inputs.items():
            row[name] = _array(tensor, f"{name} of datum {index}", len(tokens))
        for name in ("input_ids", "target_tokens"):
            if row[name].min() < 0 or row[name].max() >= num_ids:
                raise ValueError(f"{name} of datum {index} must be ids below {num_ids}. Use the model's tokenizer.")
        rows.append(row)
    shape = len(rows), max(len(row["input_ids"]) for row in rows)
    kinds = {"attention_mask": torch.bool, "input_ids": torch.long, "target_tokens": torch.long}
    columns = {name: torch.zeros(shape, dtype=kinds.get(name, torch.float32)) for name in (*kinds, *names)}
    for place, row in enumerate(rows):
        columns["attention_mask"][place, : len(row["input_ids"])] = True
        for name, values in row.items():
            columns[name][place, : len(values)] = torch.from_numpy(values.astype(np.float64))
    return TensorDict(columns, batch_size=[len(rows)])


def _tokens_of(datum: Any, index: int) -> np.ndarray:
    for chunk in datum.model_input:
        if (kind := chunk.WhichOneof("chunk")) != "encoded_text":
            raise ValueError(f"datum {index} must be of encoded text: got a chunk of {kind}. Remove it.")
    return np.frombuffer(b"".join(chunk.encoded_text.tokens for chunk in datum.model_input), "<i4")


def _array(tensor: Any, what: str, num_tokens: int) -> np.ndarray:
    """Return a tensor, which must have a number for each token."""
    dtype, is_dense, shape = _DTYPES.get(tensor.dtype), tensor.WhichOneof("encoding") == "dense", [*tensor.shape]
    if dtype is None or not is_dense or shape not in ([], [num_tokens]):
        rule = f"must be dense, float32 or int64, with a number for each of {num_tokens} tokens"
        raise ValueError(f"{what} {rule}: got shape {shape}. Several targets per token are not implemented.")
    values = np.frombuffer(tensor.dense, dtype)  # a ValueError if bytes are missing
    if len(values) != num_tokens or not np.isfinite(values).all():
        raise ValueError(f"{what} must be {num_tokens} finite numbers: got {len(values)}. Correct it.")
    return values


def write_output(logprobs_BS: torch.Tensor, lengths: Sequence[int], metrics: Mapping[str, float]) -> bytes:
    """Return the logprobs of the target tokens of each datum, and the metrics of a loss."""
    rows = [row[:length].numpy() for row, length in zip(logprobs_BS.float(), lengths, strict=True)]
    offsets = np.cumsum([0, *(row.nbytes for row in rows)], dtype="<i8").tobytes()
    values = b"".join(row.tobytes() for row in rows)
    field = proto.BatchedTensor(data=values, offsets=offsets, dtype=proto.DTYPE_FLOAT32)
    record = proto.ArrayRecord(fields={"logprobs": field}, num_datums=len(rows))
    output = proto.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", loss_fn_outputs=[record], metrics=metrics)
    return output.SerializeToString()


def write_samples(samples: Sequence[ModelResponse], prompt_logprobs: Sequence[float] | None) -> bytes:
    """Return sampled tokens with their logprobs; that of the first token of a prompt is unknown."""
    reasons = {"stop": proto.STOP_REASON_STOP, "length": proto.STOP_REASON_LENGTH}
    sequences = [
        proto.SampledSequence(
            stop_reason=reasons[sample.stop_reason],
            tokens=np.array(sample.output_tokens, "<i4").tobytes(),
            logprobs=np.array(sample.output_logprobs, "<f4").tobytes(),
        )
        for sample in samples
    ]
    response = proto.SampleResponse(sequences=sequences)
    if prompt_logprobs is not None:
        response.prompt_logprobs = np.array([np.nan, *prompt_logprobs[1:]], "<f4").tobytes()
    return response.SerializeToString()
