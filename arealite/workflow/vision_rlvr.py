"""Reinforcement learning with verifiable rewards on prompts with images."""

# B = 1 sequence, P patches, I images

from collections.abc import Mapping
from typing import Any

from tensordict import TensorDict

from arealite.api.cli_args import GenerationHyperparameters
from arealite.api.engine_api import InferenceEngine
from arealite.api.errors import TrajectoryError
from arealite.api.io_struct import ModelRequest
from arealite.api.reward_api import RewardFunction
from arealite.chat.template import prompt_tokens
from arealite.utils.background import in_thread
from arealite.utils.images import Images, as_base64, decode_image, image_processor_of, process_images
from arealite.utils.token_ids import expansion, image_token_id
from arealite.workflow.rlvr import RLVRWorkflow
from arealite.workflow.trajectory import sample_group


class VisionRLVRWorkflow(RLVRWorkflow):
    """`RLVRWorkflow` on `data["messages"]` with the images `data["images"]`, in the order of their parts.

    An image is a PIL image, encoded bytes, a path, or what Hugging Face datasets make of it. `processor` is that of the
    model, or its image processor: servers make patches of the same images by themselves, as their model's files say.
    Trajectories have `pixel_values [B, P, D]` and `image_grid_thw [B, I, 3]` too.
    """

    def __init__(
        self,
        reward_fn: RewardFunction | Mapping[RewardFunction, float],
        gconfig: GenerationHyperparameters,
        tokenizer: Any,
        processor: Any,
        enable_thinking: bool = False,
        reward_timeout: float = 15.0,
        num_reward_workers: int = 2,
    ) -> None:
        super().__init__(reward_fn, gconfig, tokenizer, enable_thinking, reward_timeout, num_reward_workers)
        self.processor = image_processor_of(processor)
        self.image_token_id = image_token_id(tokenizer)

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> TensorDict:
        """Sample and score the group of one prompt."""
        if not data.get("images"):
            raise TrajectoryError(
                "a row of VisionRLVRWorkflow must have images: got none. Set train_dataset.image_key, or drop it."
            )
        (prompt_ids,) = prompt_tokens(self.tokenizer, [data["messages"]], enable_thinking=self.enable_thinking)
        images, image_data = await in_thread(self._images, data["images"])
        places = expansion(prompt_ids, images.num_tokens, self.image_token_id)
        request = ModelRequest(
            [prompt_ids[place] for place in places],
            self.gconfig.new(n_samples=1),
            image_data=image_data,
            image_token_id=self.image_token_id,
        )
        prompt = self.tokenizer.decode(request.input_ids)
        group = await sample_group(lambda _: self._sample(engine, request, data, prompt), self.gconfig.n_samples)
        for key, tensor in (("pixel_values", images.pixel_values), ("image_grid_thw", images.grid_thw)):
            group[key] = tensor.expand(len(group), *tensor.shape)
        return group

    def _images(self, images: list[Any]) -> tuple[Images, list[str]]:
        return process_images(self.processor, map(decode_image, images)), [as_base64(image) for image in images]
