"""Prompts with images: servers get one placeholder for each, which they expand, and what was sampled as it is."""

import pytest

from arealite.api.cli_args import GenerationHyperparameters
from arealite.api.io_struct import ModelRequest
from arealite.inference.backends.lite import LiteBackend
from arealite.inference.backends.sglang import SGLangBackend
from arealite.inference.backends.vllm import VLLMBackend

PAD, ADDRESS = 9, "127.0.0.1:1"
REQUEST = ModelRequest(
    [1, PAD, PAD, PAD, 2, PAD, 3],
    GenerationHyperparameters(max_new_tokens=8),
    image_data=["Zmlyc3Q=", "c2Vjb25k"],
    image_token_id=PAD,
)
SAMPLED = [4, PAD, PAD]
WRITTEN = [1, PAD, 2, PAD, 3, *SAMPLED]


@pytest.mark.parametrize("backend", [SGLangBackend, LiteBackend])
def test_sglang_gets_them_as_image_data(backend: type[SGLangBackend]) -> None:
    payload = backend(pause_mode="abort").payload(ADDRESS, REQUEST, SAMPLED, seed=0)
    assert (payload["input_ids"], payload["image_data"]) == (WRITTEN, REQUEST.image_data)
    assert payload["sampling_params"]["max_new_tokens"] == 5


def test_vllm_gets_them_as_parts() -> None:
    backend = VLLMBackend(pause_mode="abort")
    payload = backend.payload(ADDRESS, REQUEST, SAMPLED, seed=0)
    assert payload["token_ids"] == WRITTEN
    urls = [f"data:image/png;base64,{one}" for one in REQUEST.image_data]
    assert payload["content_parts"] == [{"type": "image_url", "url": url} for url in urls]


def test_placeholders_have_an_id() -> None:
    with pytest.raises(ValueError, match=r"^a request with image_data must have an image_token_id: got None"):
        SGLangBackend(pause_mode="abort").payload(ADDRESS, ModelRequest([1], image_data=["Zg=="]), [], seed=0)
