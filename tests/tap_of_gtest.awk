# GoogleTest's output as TAP. Of programs that ran one after the other; "exit N" is a line of its own where one failed.
/^\[       OK \]/        { print "ok " ++number " - " $4 }
/^\[  FAILED  \].* ms\)/ { print "not ok " ++number " - " $4 }
/^\[  SKIPPED \]/        { print "ok " ++number " - " $4 " # SKIP" }
/^exit [1-9]/            { print "not ok " ++number " - exit status " $2 }
!/^\[|^exit / && NF      { print "# " $0 }
END                      { print "1.." number }
