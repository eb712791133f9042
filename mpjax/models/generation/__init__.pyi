"""What `mpjax.models.generation` offers."""

from mpjax.models.generation.cached_logits import through_cache as through_cache
from mpjax.models.generation.continuations import generate as generate
from mpjax.models.generation.programs import padded_length as padded_length
from mpjax.models.generation.programs import programs_of as programs_of
from mpjax.models.generation.programs import split as split
from mpjax.models.generation.sampling import Sampling as Sampling
from mpjax.models.generation.sampling import sampled as sampled
