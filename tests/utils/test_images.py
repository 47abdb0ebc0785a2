import base64
import io

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from testing_images import picture
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLModel, Qwen2VLImageProcessorPil

from arealite.utils.images import (
    Images,
    as_base64,
    count_image_tokens,
    decode_image,
    from_base64,
    placeholder_mask,
    process_images,
    rope_positions,
)

PAD, MERGE = 9, 2


class OfTransformers(Qwen2_5_VLModel):
    """`get_rope_index` needs a config and no weights."""

    def __init__(self) -> None:
        torch.nn.Module.__init__(self)
        self.config = Qwen2_5_VLConfig(image_token_id=PAD)


@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(1, 3), st.integers(1, 4)), max_size=4),
    st.integers(0, 3),
    st.integers(0, 2),
)
def test_positions_are_those_of_transformers(shown: list[tuple[int, int, int]], tail: int, num_sampled: int) -> None:
    """Of texts (their length) each followed by an image (height and width in tokens), and a tail."""
    ids, grids = [], []
    for text, height, width in shown:
        ids += [1] * text + [PAD] * (height * width)
        grids.append([1, height * MERGE, width * MERGE])
    ids += [1] * (tail + (not ids))
    grid_thw, ids_L = torch.tensor(grids, dtype=torch.long).view(-1, 3), torch.tensor(ids)
    is_image = placeholder_mask(ids_L, int((ids_L == PAD).sum()), PAD)
    positions = rope_positions(is_image, grid_thw, MERGE)
    expected, delta = OfTransformers().get_rope_index(ids_L[None], is_image.int()[None], grid_thw)
    assert torch.equal(positions, expected[:, 0])
    images = Images(torch.zeros(0, 1), grid_thw, MERGE)
    assert (images.position_shift, sum(images.num_tokens)) == (delta.item(), int(is_image.sum()))
    longer = torch.cat([ids_L, torch.tensor([1] + [PAD] * num_sampled)])  # sampled ids are no placeholders
    is_image = placeholder_mask(longer, int((ids_L == PAD).sum()), PAD)
    assert not is_image[len(ids) :].any()
    after = rope_positions(is_image, grid_thw, MERGE)[:, len(ids) :]
    assert torch.equal(after, (torch.arange(len(ids), len(longer)) + delta[0]).expand(3, -1))


def test_tokens_are_counted_without_patches() -> None:
    processor = Qwen2VLImageProcessorPil(size={"shortest_edge": 28 * 28, "longest_edge": 112 * 112})
    for width, height in ((56, 56), (30, 200), (640, 480), (1, 3)):
        image = Image.new("L", (width, height), 3)
        images = process_images(processor, [image])
        assert images.num_tokens == [count_image_tokens(processor, image)]
        assert images.pixel_values.shape == (4 * images.num_tokens[0], 3 * 2 * 14 * 14)


def encoded(image: Image.Image, kind: str) -> bytes:
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


def test_servers_get_the_pixels_that_the_trainer_has(tmp_path) -> None:
    image = picture("wide")
    (tmp_path / "a.png").write_bytes(encoded(image, "PNG"))
    jpeg = encoded(image, "JPEG")
    rows = (image, encoded(image, "PNG"), str(tmp_path / "a.png"), {"bytes": jpeg}, {"path": tmp_path / "a.png"})
    for one in rows:
        ours = np.asarray(decode_image(one).convert("RGB"))
        assert np.array_equal(np.asarray(from_base64(as_base64(one)).convert("RGB")), ours)
        assert np.array_equal(np.asarray(from_base64(f"data:image/png;base64,{as_base64(one)}")), ours)
    assert as_base64({"bytes": jpeg}) == base64.b64encode(jpeg).decode(), "what is encoded stays as it is"


EPS = base64.b64encode(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n%%EOF\n").decode()
"""Which would run a program."""


@pytest.mark.parametrize("text", ["", "/etc/passwd", "http://127.0.0.1/a.png", "data:image/png;base64,AAAA", "ü", EPS])
def test_what_is_no_image_is_refused_and_nothing_is_fetched(text: str) -> None:
    with pytest.raises(ValueError, match=r"^image_data must be base64 of an image file: got "):
        from_base64(text)


def test_a_picture_that_is_cut_or_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    half = encoded(picture("wide"), "PNG")[:900]
    with pytest.raises(ValueError, match=r"^image_data must be base64 of an image file: got"):
        from_base64(base64.b64encode(half).decode())
    head, _, rest = encoded(picture("wide"), "PNG").partition(b"IDAT")
    damaged = head[:-4] + (8).to_bytes(4, "big") + b"IDAT" + rest[:8] + bytes(99)  # PIL calls it a SyntaxError
    with pytest.raises(ValueError, match=r"^image_data must be base64 of an image file: got broken PNG file"):
        from_base64(base64.b64encode(damaged).decode())
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(ValueError, match=r"^image_data must be base64 .*got Image size .* decompression bomb"):
        from_base64(as_base64(encoded(picture("wide"), "PNG")))
