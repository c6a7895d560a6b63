"""Recipe of the bundled policy: its phrases, table demonstrations, colour gate and stages.
Post-training needs none of it.
"""
