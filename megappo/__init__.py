"""megappo: a Megatron-native, pipeline-parallel PPO trainer for large language models."""

__version__ = "0.1.0"
