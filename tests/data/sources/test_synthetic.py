import numpy as np
import pytest

from mpjax.data.sources import synthetic_source
from mpjax.errors import UsageError


def arrays(examples):
    every = examples.__getitems__(range(len(examples)))
    return np.stack([example["image"] for example in every]), np.array([example["label"] for example in every])


def test_shape_dtype_and_even_labels():
    images, labels = arrays(synthetic_source(3, (6, 5, 2), 9).train)
    assert (images.shape, images.dtype) == ((9, 6, 5, 2), np.uint8)
    assert np.bincount(labels).tolist() == [3, 3, 3]


def test_reading_again_gives_the_same_and_other_seeds_and_splits_others():
    source = synthetic_source(3, (4, 4, 1), 2)
    np.testing.assert_array_equal(source.train[1]["image"], source.train[1]["image"])
    assert (source.train[1]["image"] != source.test[1]["image"]).any()
    assert (source.train[1]["image"] != synthetic_source(3, (4, 4, 1), 2, seed=1).train[1]["image"]).any()


def test_the_nearest_class_mean_of_train_classifies_test():
    source = synthetic_source(10, (8, 8, 3), 50)
    images, labels = arrays(source.train)
    means = np.stack([images[labels == label].mean(0) for label in range(10)])
    tested, wanted = arrays(source.test)
    distances = ((tested[:, None].astype(float) - means[None]) ** 2).sum((2, 3, 4))
    assert (distances.argmin(1) == wanted).all()


def test_no_examples_are_refused():
    with pytest.raises(UsageError, match="empty"):
        synthetic_source(3, (4, 4, 1), 0)
