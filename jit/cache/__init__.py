"""The cache layers: get and put bytes; a bad entry is a miss, and no cache problem ever fails a build."""
