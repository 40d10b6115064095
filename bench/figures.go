package main

import "slices"

// figures are measured in this order.
var figures = slices.Concat(
	chargeFigures, thresholdFigures, batchFigures, windowFigures, walletFigures, commandFigures, leaseFigures, allowFigures, pieceFigures, holdFigures, seatFigures, carveFigures, observerFigures, pageFigures, // with goals
)
