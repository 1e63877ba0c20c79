"""shardwise: proven hybrid-parallel plans for large language models."""
