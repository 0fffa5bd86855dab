"""Small reference models in plain Flax NNX, written for one device, and their losses.

The models contain no parallelism: strategies shard them from outside, by the paths of their leaves.
Start reading in `transformer.py`; `transformer_config.py` has its presets, `layers.py` its layers
and `attention.py` the attention implementations; `generate.py` continues prompts. `vit.py` and
`resnet.py` classify images. `formats.py` has an entry for each decoder family on the Hugging Face
hub, `weight_rules.py` maps their tensors to parameters, and `snapshot.py` compares a model with
the config of a snapshot.
"""

from .attention import ATTENTION_FORMS as ATTENTION_FORMS
from .attention import auto_attention as auto_attention
from .attention import cudnn_attention as cudnn_attention
from .attention import cudnn_obstacle as cudnn_obstacle
from .attention import describe_attention as describe_attention
from .attention import einsum_attention as einsum_attention
from .attention import flash_attention as flash_attention
from .config import ACTIVATIONS as ACTIVATIONS
from .config import ExpertConfig as ExpertConfig
from .experts import Experts as Experts
from .generate import Decoder as Decoder
from .generate import Generated as Generated
from .generate import Sampling as Sampling
from .generate import draw as draw
from .generate import generate as generate
from .generate import kept_logits as kept_logits
from .layers import MLP as MLP
from .layers import Cache as Cache
from .layers import GatedMLP as GatedMLP
from .layers import Past as Past
from .layers import Place as Place
from .layers import PlainMLP as PlainMLP
from .layers import RMSNorm as RMSNorm
from .layers import SelfAttention as SelfAttention
from .layers import cached_attention as cached_attention
from .loss import classification_loss as classification_loss
from .loss import cross_entropy as cross_entropy
from .loss import is_likeliest as is_likeliest
from .loss import next_token_loss as next_token_loss
from .loss import next_token_scores as next_token_scores
from .resnet import RESNET_PRESETS as RESNET_PRESETS
from .resnet import ResidualBlock as ResidualBlock
from .resnet import ResNet as ResNet
from .resnet import ResNetConfig as ResNetConfig
from .rotary import RopeScaling as RopeScaling
from .rotary import rotate as rotate
from .transformer import Block as Block
from .transformer import Transformer as Transformer
from .transformer import positions_in as positions_in
from .transformer import scan_layers as scan_layers
from .transformer_config import PRESETS as PRESETS
from .transformer_config import TransformerConfig as TransformerConfig
from .transformer_config import num_params as num_params
from .vit import VIT_PRESETS as VIT_PRESETS
from .vit import ViT as ViT
from .vit import ViTBlock as ViTBlock
from .vit import ViTConfig as ViTConfig
