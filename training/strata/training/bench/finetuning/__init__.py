"""`strata bench finetune`: Strata's fine-tuning and Hugging Face's libraries on the same model, rows and steps."""
