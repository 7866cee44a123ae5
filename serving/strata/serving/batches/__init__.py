"""OpenAI's files and batches: uploaded JSONL files whose requests run in the background, in the idle slots of the engines."""
