"""The cache layers: get and put bytes. A bad entry is a miss, and no problem of the cache fails a build."""
