"""Words on a picture: where they are asked for, cut at the edge of the page, text in an SVG."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from service.lettering import Words, blend, mask_of, width_of
from service.options import Kind, PictureOptions
from service.style import Sheet


def page() -> np.ndarray:
    return np.full((100, 300, 3), 255, np.uint8)


def ink(pixels: np.ndarray) -> tuple[int, int, int, int]:
    """First and last column and row, from the bottom, that something is drawn on."""
    rows, columns = np.nonzero((pixels < 128).all(axis=-1))
    height = pixels.shape[0]
    return columns.min(), columns.max(), height - 1 - rows.max(), height - 1 - rows.min()


def test_words_stand_on_their_baseline():
    pixels = page()
    blend(pixels, Words(50, 40, "Hxn", 20, "#000000"), dpi=72)
    left, right, bottom, top = ink(pixels)
    assert 50 <= left <= 53
    assert abs(bottom - 40) <= 1
    assert abs((top - bottom + 1) - 0.73 * 20) <= 1  # rows of ink, both ends included
    assert abs((right - left + 1) - width_of("Hxn", 20)) <= 4


def test_words_are_placed_by_their_middle_and_end():
    spans = {}
    for horizontal in ("left", "center", "right"):
        pixels = page()
        blend(pixels, Words(150, 40, "HnnH", 20, "#000000", horizontal), dpi=72)
        left, right, _, _ = ink(pixels)
        spans[horizontal] = (left, right)
    assert spans["left"][0] >= 150
    assert spans["right"][1] <= 150
    assert abs(sum(spans["center"]) / 2 - 150) <= 2


def test_upright_words_read_from_below():
    flat, upright = page(), page()
    blend(flat, Words(150, 50, "HL", 20, "#000000", "center", "center"), dpi=72)
    blend(upright, Words(150, 50, "HL", 20, "#000000", "center", "center", upright=True), dpi=72)
    left, right, bottom, top = ink(upright)
    x0, x1, y0, y1 = ink(flat)
    assert abs((top - bottom) - (x1 - x0)) <= 1
    assert abs((right - left) - (y1 - y0)) <= 1
    assert abs((left + right) / 2 - 150) <= 2
    # The foot of the L is at the end of its line, that is above, on the right.
    assert (upright[100 - top : 100 - top + 4, right - 3 : right + 1] < 128).any()


@given(
    st.integers(-400, 700), st.integers(-300, 300), st.text(max_size=30), st.booleans(),
    st.sampled_from(["left", "center", "right"]), st.sampled_from(["baseline", "center", "top"]),
)  # fmt: skip
@settings(max_examples=80, deadline=None)
def test_whatever_leaves_the_page_is_cut(x, y, text, upright, horizontal, vertical):
    pixels = page()
    blend(pixels, Words(x, y, text, 12, "#123456", horizontal, vertical, upright), dpi=100)
    assert pixels.min() >= 0x12


def test_masks_are_kept_and_not_changed():
    mask, _ = mask_of("kept", 11, 100)
    before = mask.copy()
    blend(page(), Words(10, 10, "kept", 11, "#ff0000"), dpi=100)
    assert mask_of("kept", 11, 100)[0] is mask
    assert np.array_equal(mask, before)


def test_a_drawing_has_its_words_too():
    for kind in (Kind.svg, Kind.pdf):
        plain = Sheet(PictureOptions(title=""), "")
        titled = Sheet(PictureOptions(title="A title of its own"), "")
        for sheet in (plain, titled):
            sheet.axes("", "")
        assert len(titled.save(kind)) > len(plain.save(kind)) + 500
