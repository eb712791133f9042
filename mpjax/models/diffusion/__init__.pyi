"""What `mpjax.models.diffusion` offers."""

from mpjax.models.diffusion.conditioning import sines as sines
from mpjax.models.diffusion.dit import DiT as DiT
from mpjax.models.diffusion.unet import DiffusionUNet as DiffusionUNet
