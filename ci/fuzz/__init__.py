"""Fuzz targets for everything that takes bytes: ``python -m fuzz TARGET`` runs one under atheris."""
