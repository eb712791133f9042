"""Masks that were stored as JPEG: their noise is told, and never proposed as classes."""

import io
import warnings

import numpy as np
import pytest
from PIL import Image

from mpjax.config import Data
from mpjax.data.images import compression_noise, decoded_mask, mask_values, unknown_classes
from mpjax.errors import DataWarning, UsageError


def stored(file_format, low=0, high=255):
    """Two masks of a disk in this format, and the values that come of them."""
    across = np.arange(32) - 15.5
    disk = across[:, None] ** 2 + across**2 < 90
    buffer = io.BytesIO()
    Image.fromarray(np.where(disk, high, low).astype(np.uint8)).save(buffer, file_format)
    examples = [{"mask": buffer.getvalue()}] * 2
    return examples, [{"mask": decoded_mask(example["mask"])} for example in examples]


SAYS = "^mask: masks: a JPEG, .* in 2 of 2 masks of 'cells' are 0, 1, .* near 0, 255; write the masks as PNG"


def test_noise_is_not_proposed_as_classes():
    files, masks = stored("JPEG")
    error = unknown_classes(masks, Data(), "cells", "", files)
    with pytest.raises(UsageError, match=SAYS):
        raise error
    assert error.repair == {}


def test_noise_is_an_error_unless_its_values_are_given():
    files, masks = stored("JPEG")
    values = tuple(np.unique(masks[0]["mask"]).tolist())
    for config in (Data(mask_values=(0, 255)), Data(num_classes=len(values))):
        with pytest.raises(UsageError, match=SAYS):
            mask_values(masks, config.stated_classes, config, "cells", files)
    with pytest.warns(DataWarning, match=SAYS):
        mask_values(masks, len(values), Data(mask_values=values), "cells", files)


def test_values_that_are_far_apart_or_exact_are_no_noise():
    with warnings.catch_warnings(action="error"):
        files, masks = stored("PNG", 1, 0)
        assert mask_values(masks, 2, Data(), "cells", files).classes == (0, 1)
    jpegs, _ = stored("JPEG")
    assert compression_noise({0: 9, 255: 9}, jpegs, "") == ""
    assert compression_noise({0: 9, 1: 9}, None, "") == ""  # of a function of the user's
