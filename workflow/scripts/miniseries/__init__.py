"""The GPT-2 miniseries, from text to evaluated models; knows nothing of Snakemake."""
