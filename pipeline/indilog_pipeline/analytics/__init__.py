"""Jobs over logs that operators run: `indilog analyse` (docs/SPARK.md, "Analyse")."""
