"""Text encoders.

encoder.py   encoders of all families, composed from settings
families.py  those settings: BERT, RoBERTa, MPNet, DistilBERT, ModernBERT, nomic-bert
"""
