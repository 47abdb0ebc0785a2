"""Runs any Hugging Face causal language model over our slot cache, by the model's own forward, so that logprobs equal
the trainer's. A model for which our attention differs (recurrent state, attention sinks) is refused on loading.

On a GPU, decoding runs as CUDA graphs: Python launches the kernels of a small model more slowly than they run. A graph
has one shape, so numbers of sequences and lengths are rounded up. Added rows write to the last position of their slots,
which no sequence uses: the last token of the longest sequence has no successor."""

# n sequences, N packed tokens, V vocabulary, H hidden size, L tokens of a prompt

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import PreTrainedModel

from arealite.generation.slot_attention import ATTENTION_NAME, PackedPrefill, SlotCache, SlotDecode, SlotStep
from arealite.utils.hf import as_in_checkpoint, require_fixed_rope
from arealite.utils.images import Images, placeholder_mask, rope_positions, sees_images
from arealite.utils.tensors import on_device

logger = logging.getLogger(__name__)
MAX_GRAPHS = 64  # each costs memory


class ModelRunner:
    """Weights and KV cache of one model. One thread uses it."""

    def __init__(self, model: PreTrainedModel, *, slots: int, context: int, deterministic: bool = False) -> None:
        """Replace the model's attention; updates overwrite its weights. `deterministic` runs one sequence per forward
        pass: slower, but its bits do not depend on others (the shape of a matrix product changes its rounding)."""
        config = model.config.get_text_config()
        if not hasattr(config, "num_attention_heads"):
            raise ValueError(f"the model must attend: got {type(model).__name__}. Serve it with SGLang or vLLM.")
        require_fixed_rope(config)
        limit = getattr(config, "max_position_embeddings", context)
        if context > limit:
            logger.warning("context is %d tokens, the model's limit, instead of %d", limit, context)
            context = limit
        self.model = model.eval().requires_grad_(False)
        self.device = model.device
        self.deterministic = deterministic
        self._parameters = dict(model.named_parameters())
        for parameter in self._parameters.values():
            if parameter.data_ptr() % 64:  # as mapped from a file; some matrix products round by it
                parameter.data = parameter.data.clone()
        self._shared: set[str] = set()  # parameters whose storage is the trainer's
        names = {id(parameter): name for name, parameter in self._parameters.items()}
        every_parameter = dict(model.named_parameters(remove_duplicate=False))
        self._tied = {name: names[id(p)] for name, p in every_parameter.items() if name not in self._parameters}
        meta = {name: torch.empty(parameter.shape, device="meta") for name, parameter in self._parameters.items()}
        required = as_in_checkpoint(model, meta)
        self._required = required.keys()
        self._tied = {name: next(iter(as_in_checkpoint(model, {by: meta[by]}))) for name, by in self._tied.items()}
        # Every weight that an update may contain, by its name in the checkpoint.
        weights = required | {name: every_parameter[name] for name in self._tied}
        self.weight_shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
        self.vocab_size: int = model.get_output_embeddings().weight.shape[0]
        self.cache = SlotCache(model, slots=slots, context=context)
        is_dense = not any(getattr(config, name, None) for name in ("num_experts", "num_local_experts"))
        self._graphs: DecodeGraphs | None = None
        if self.device.type == "cuda" and is_dense and not deterministic:  # choosing experts reads numbers
            self._graphs = DecodeGraphs(self.decode_step, slots=slots, context=context, device=self.device)
        self._check_against_reference()

    def prefill(
        self,
        prompts: Sequence[Sequence[int]],
        slots: Sequence[int],
        images: Sequence[Images | None] | None = None,
        starts: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Fill the slots with prompts and their images; return the logits after each prompt's last token, `[n, V]`.

        Slots hold the first `starts` tokens of their prompts already; a prompt with images must start at 0."""
        images, starts = images or [None] * len(prompts), starts or [0] * len(prompts)
        if self.deterministic and len(prompts) > 1:
            rows = zip(prompts, slots, images, starts, strict=True)
            return torch.cat([self.prefill([prompt], [slot], [image], [start]) for prompt, slot, image, start in rows])
        new = [list(prompt[start:]) for prompt, start in zip(prompts, starts, strict=True)]
        step = PackedPrefill(self.cache, slots, [len(tokens) for tokens in new], starts)
        tokens_N = torch.tensor([token for tokens in new for token in tokens]).to(self.device)
        inputs, positions = {"input_ids": tokens_N[None]}, step.positions_N[None]
        if any(images):
            positions, embeddings = self._with_images(tokens_N.split(step.lengths), images, starts)
            inputs = {"inputs_embeds": embeddings}
        last_n = (torch.tensor(step.ends) - 1).to(self.device)
        return self._forward(inputs, positions, step, last_n)[0]

    def decode(
        self, tokens: Sequence[int], positions: np.ndarray, first_slot: int = 0, shifts: np.ndarray | None = None
    ) -> torch.Tensor:
        """Append one token to each of the sequences in consecutive slots; return their next logits, `[n, V]`.

        `shifts` are added to the positions for rotary embeddings (`Images.position_shift`)."""
        shifts = np.zeros_like(positions) if shifts is None else shifts
        if self.deterministic and len(tokens) > 1:
            rows = [slice(row, row + 1) for row in range(len(tokens))]
            return torch.cat([self.decode(tokens[row], positions[row], row.start, shifts[row]) for row in rows])
        inputs_3n = on_device(torch.from_numpy(np.stack([tokens, positions, positions + shifts])), self.device)
        length = int(positions.max()) + 1
        if self._graphs is not None and first_slot == 0:
            return self._graphs.decode(inputs_3n, length)
        return self.decode_step(inputs_3n, length, first_slot)

    def decode_step(self, inputs_3n: torch.Tensor, length: int, first_slot: int = 0) -> torch.Tensor:
        """Decode (tokens, positions, rotary positions), `[3, n]`, over caches of at most `length` tokens."""
        tokens_n, positions_n, rotary_n = inputs_3n
        step = SlotDecode(self.cache, first_slot, positions_n, length)
        return self._forward({"input_ids": tokens_n[:, None]}, rotary_n[:, None], step, 0)[:, 0]

    def _with_images(
        self, prompts: Sequence[torch.Tensor], images: Sequence[Images | None], starts: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return rotary positions `[3, 1, N]` and embeddings `[1, N, H]` of packed prompts, images in their places."""
        token_id, positions, embeddings = self.model.config.image_token_id, [], []
        for tokens_L, image, start in zip(prompts, images, starts, strict=True):
            embedded_LH = self.model.get_input_embeddings()(tokens_L)
            if image is None:
                positions.append(torch.arange(start, start + len(tokens_L), device=self.device).expand(3, -1))
            else:
                is_image = placeholder_mask(tokens_L, sum(image.num_tokens), token_id)
                patches, grid = image.pixel_values.to(self.device), image.grid_thw.to(self.device)
                seen = self.model.get_image_features(patches, grid).pooler_output
                embedded_LH[is_image] = torch.cat(list(seen)).to(embedded_LH.dtype)
                positions.append(rope_positions(is_image.cpu(), image.grid_thw, image.merge).to(self.device))
            embeddings.append(embedded_LH)
        return torch.cat(positions, 1)[:, None], torch.cat(embeddings)[None]

    def _forward(
        self, inputs: dict[str, torch.Tensor], positions: torch.Tensor, step: SlotStep, rows: int | torch.Tensor
    ) -> torch.Tensor:
        """Return logits at these rows of the sequence; 0 is all."""
        options = {"position_ids": positions, "use_cache": False, "logits_to_keep": rows, "slot_step": step}
        return self.model(**inputs, **options).logits

    def _check_against_reference(self) -> None:
        """Refuse a model whose prefill or decoding of a few tokens differs from its own attention."""
        tokens = [(7 * i + 3) % self.vocab_size for i in range(8)]
        slots = list(range(min(2, self.cache.slots)))
        prompts = [tokens[:3], tokens[:6]][-len(slots) :]
        name = type(self.model).__name__
        with torch.inference_mode():
            output = self.model(input_ids=torch.tensor([tokens], device=self.device), use_cache=False)
            reference: torch.Tensor = output.logits[0, [2, 5, 6, 7][-len(slots) - 2 :]].float()
            try:
                parts = {"": ATTENTION_NAME, "text_config": ATTENTION_NAME}  # a vision tower keeps its attention
                self.model.set_attn_implementation(parts if sees_images(self.model.config) else ATTENTION_NAME)
                prefilled = self.prefill(prompts, slots)
                decoded = [self.decode([tokens[p]], np.array([p]), slots[-1]) for p in (6, 7)]
            except (TypeError, AttributeError, RuntimeError) as error:
                raise ValueError(
                    f"the model must run on Hugging Face's attention interface: got {name}, which raised "
                    f"{type(error).__name__}: {error}. Serve it with SGLang or vLLM."
                ) from error
        difference = (torch.cat([prefilled, *decoded]).float() - reference).abs().max().item()
        bound = (2e-3 if self.model.dtype == torch.float32 else 8e-2) * max(reference.abs().max().item(), 1e-3)
        if not difference <= bound:
            raise ValueError(
                f"logits from the KV cache must equal the model's own forward: got {name} with a difference of "
                f"{difference:.2g}, where {bound:.2g} could be rounding. Serve it with SGLang or vLLM."
            )

    def load_weights(
        self, weights: Mapping[str, torch.Tensor], *, shares: bool = False, is_partial: bool = False
    ) -> None:
        """Overwrite all weights, cast to the model's dtype; if they don't fit, raise ValueError and change nothing.
        A tied weight may be absent, or equal to its source. With `is_partial` absent weights keep their values.

        With `shares` a tensor of the dtype and device of a parameter becomes its storage: the caller may change it
        later, passing it again copies nothing, and weights from elsewhere are refused."""
        if self._shared and not shares:
            raise ValueError(
                "weights must come from the trainer of this process, whose parameters these are: got others. Let it "
                "load them, and publish."
            )
        missing = sorted(self._required - weights.keys())
        if missing and not is_partial:
            raise ValueError(
                f"weights must be complete: got {len(missing)} missing, {missing[:3]}. Send every parameter."
            )
        check_shapes({name: tuple(tensor.shape) for name, tensor in weights.items()}, self.weight_shapes)
        for name, source in self._tied.items():
            if name in weights and not (source in weights and torch.equal(weights[name], weights[source])):
                raise ValueError(f"{name} must equal {source}, to which it is tied: got other values. Leave it out.")
        for name, parameter in self._parameters.items():
            if name in weights and shares and name not in self._shared:
                self._share(name, weights[name])
            elif name in weights and weights[name].data_ptr() != parameter.data_ptr():
                parameter.copy_(weights[name])
            elif name not in weights and name not in self._required:  # in a checkpoint it has other names, or parts
                # Converting the indices of its elements shows where those of the checkpoint belong.
                indices = torch.arange(parameter.numel(), device=self.device).view(parameter.shape)
                for part, part_indices in as_in_checkpoint(self.model, {name: indices}).items():
                    if part in weights:
                        parameter.view(-1)[part_indices] = weights[part].to(parameter)

    def _share(self, name: str, weight: torch.Tensor) -> None:
        """Use a tensor as storage of a parameter, or copy it if dtype or device differ."""
        parameter = self._parameters[name]
        if (weight.dtype, weight.device) != (parameter.dtype, parameter.device):
            parameter.copy_(weight)
            return
        parameter.data = weight
        self._shared.add(name)
        if self._graphs is not None:  # which read the old storage
            self._graphs.captured.cache_clear()


class DecodeGraphs:
    """Decoding steps as CUDA graphs, one for each shape, the last used of which are kept."""

    def __init__(
        self, step: Callable[[torch.Tensor, int], torch.Tensor], *, slots: int, context: int, device: torch.device
    ) -> None:
        """`step` is `ModelRunner.decode_step`."""
        self._step, self._slots, self._context = step, slots, context
        self._inputs_3n = torch.zeros(3, slots, dtype=torch.int64, device=device)
        self._logits_nV: torch.Tensor | None = None  # of all graphs, which share this memory too:
        self._pool = torch.cuda.graph_pool_handle()
        self.captured = functools.lru_cache(maxsize=MAX_GRAPHS)(self._capture)

    def decode(self, inputs_3n: torch.Tensor, length: int) -> torch.Tensor:
        """Decode a token of slots 0..n-1; return logits `[n, V]`, which the next call overwrites."""
        n = inputs_3n.shape[1]
        num_rows = min(max(8, 1 << (n - 1).bit_length()), self._slots)
        rounding = max(256, (1 << length.bit_length()) // 16)
        self._inputs_3n[:, :n] = inputs_3n
        self._inputs_3n[:, n:num_rows] = 0
        self._inputs_3n[1, n:num_rows] = self._context - 1
        self.captured(num_rows, min(-(-length // rounding) * rounding, self._context)).replay()
        assert self._logits_nV is not None, "the first step has made it"
        return self._logits_nV[:n]

    def _capture(self, num_rows: int, length: int) -> torch.cuda.CUDAGraph:
        inputs_3n, stream = self._inputs_3n[:, :num_rows], torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # libraries initialize in the first pass, which must not be captured
            logits_nV = self._step(inputs_3n, length)
        torch.cuda.current_stream().wait_stream(stream)
        if self._logits_nV is None:
            self._logits_nV = logits_nV.new_empty(self._slots, logits_nV.shape[1])
        graph = torch.cuda.CUDAGraph()
        # Another thread, a trainer's, may allocate memory meanwhile.
        with torch.cuda.graph(graph, self._pool, capture_error_mode="thread_local"):
            self._logits_nV[:num_rows] = self._step(inputs_3n, length)
        return graph


def check_shapes(shapes: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ValueError for a name that is not expected or has another shape."""
    unknown = sorted(shapes.keys() - expected.keys())
    if unknown:
        raise ValueError(
            f"names of weights must be those of the checkpoint: got {len(unknown)} unknown, {unknown[:3]}. "
            "Send parameters under their Hugging Face names."
        )
    for name, shape in shapes.items():
        if shape != expected[name]:
            raise ValueError(
                f"shape of {name} must be {list(expected[name])}: got {list(shape)}. "
                "Send weights of the same architecture."
            )


def read_checkpoint(path: str) -> dict[str, torch.Tensor]:
    """Read all safetensors files of a Hugging Face folder; ValueError if there are none."""
    files = sorted(Path(path).glob("*.safetensors"))
    if not files:
        raise ValueError(
            f"model_path must be a folder with *.safetensors files: got {path}. Save a Hugging Face checkpoint there."
        )
    weights: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            weights.update(load_file(file))
        except SafetensorError as error:
            raise ValueError(f"{file} must be a complete safetensors file: got {error}. Write it again.") from error
    return weights
